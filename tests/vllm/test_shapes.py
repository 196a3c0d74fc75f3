"""Faults that need another start of vLLM: at load, with two ranks, with asynchronous outputs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running import available
from supervised import LIMITS, Supervised, gone, until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not available(), reason="no vLLM environment here (make venv-vllm)"),
]


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shape")


def follow(chat: Supervised, known: set[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Wait for the stall, the end of its tree and the next READY; its report."""
    old = chat.member_pids()
    incarnation = chat.engine()["incarnation"]
    stall = chat.wait_stall(known, 120)
    until(lambda: gone(old), seconds=40, what="the end of the old tree")
    chat.wait_ready(incarnation + 1)
    assert chat.serve_one().status == 200
    report = chat.report(stall["id"])
    with capsys.disabled():
        sys.stdout.write(f"\n  {report['kind']}: {report['summary']}\n")
    return report


@pytest.fixture
def loading(folder: Path) -> Iterator[Supervised]:
    running = Supervised(
        folder,
        limits={**LIMITS, "load_model": "10s"},
        before=lambda faults: faults.arm("worker/load_model", "block_in_c"),
    )
    try:
        yield running
    finally:
        running.end()


def test_a_load_that_never_returns_is_never_ready(
    loading: Supervised, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM has no deadline for load_model; the worker and the frame are named, the next start serves."""
    loading.faults.wait_done(timeout_s=180)
    until(lambda: loading.engine().get("processes"), seconds=30, what="members")

    report = follow(loading, set(), capsys)

    assert report["kind"] == "NEVER_READY"
    assert report["culprit"]["process"] == "worker:0"
    assert report["culprit"]["phase"] == "load_model"
    assert "_sem_wait" in report["culprit"]["frame"]


@pytest.fixture
def two_ranks(folder: Path) -> Iterator[Supervised]:
    running = Supervised(folder, "-tp", "2", environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"})
    try:
        running.wait_ready()
        yield running
    finally:
        running.end()
    assert running.left_behind() == set()  # its segments in /dev/shm, after a kill and after a stop


def test_an_exception_on_a_silent_rank_names_that_rank(
    two_ranks: Supervised, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 raises and tells nobody, rank 0 waits in the collective: rank 1 is the culprit."""
    two_ranks.serve_one()
    clients = [two_ranks.client(stream=True), two_ranks.client(stream=False)]
    assert clients[0].first_byte.wait(60)
    two_ranks.faults.arm("worker/execute_model", "raise", rank=1)
    two_ranks.faults.wait_done(timeout_s=60)

    report = follow(two_ranks, set(), capsys)

    assert report["culprit"]["process"] == "worker:1", report["summary"]
    assert report["kind"] in {"ERROR_SWALLOWED", "COLLECTIVE_DIVERGENCE"}
    for client in clients:
        assert client.done.wait(5), "a client hangs"
        assert client.error(), client.body[-300:]


@pytest.fixture
def asynchronous(folder: Path) -> Iterator[Supervised]:
    running = Supervised(folder, asynchronous=True)
    try:
        running.wait_ready()
        yield running
    finally:
        running.end()


def test_an_output_event_that_never_completes_is_found_in_the_copy_thread(
    asynchronous: Supervised, capsys: pytest.CaptureFixture[str]
) -> None:
    """The worker's main thread is idle again; the output lane stands in the copy and is named."""
    asynchronous.serve_one()
    clients = [asynchronous.client(stream=True), asynchronous.client(stream=False)]
    assert clients[0].first_byte.wait(60)
    asynchronous.faults.arm("worker/output", "event_never")
    asynchronous.faults.wait_done(timeout_s=60)

    report = follow(asynchronous, set(), capsys)

    assert report["kind"] in {"UNKNOWN_STALL", "DEVICE_WAIT"}
    assert report["culprit"]["process"] == "worker:0", report["summary"]
    assert report["culprit"]["lane"] == "worker:0/output", report["summary"]
    for client in clients:
        assert client.done.wait(5), "a client hangs"
        assert client.error(), client.body[-300:]
