"""One vLLM takes every fault in turn: found, named, answered, killed, restarted, served."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pytest
from running import available
from supervised import Client, Supervised, gone, until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(480),
    pytest.mark.skipif(not available(), reason="no vLLM environment here (make venv-vllm)"),
]


@dataclass(frozen=True)
class Injection:
    """One fault, and what must be said about it."""

    name: str
    kinds: frozenset[str]
    process: str
    frame: str = ""  # a part of the culprit's frame; "": none is asked for
    arm: tuple[str, str] | None = None
    signal: tuple[str, int] | None = None
    answered: bool = True  # False: the API process is the victim, its connections close


def _kinds(*names: str) -> frozenset[str]:
    return frozenset(names)


INJECTIONS = [
    Injection(
        "worker blocked in C", _kinds("DEVICE_WAIT"), "worker:0", "_sem_wait",
        arm=("worker/execute_model", "block_in_c"),
    ),
    Injection(
        "worker stopped", _kinds("PROCESS_STOPPED"), "worker:0",
        signal=("worker:0", signal.SIGSTOP),
    ),
    Injection(
        "engine core stopped", _kinds("PROCESS_STOPPED"), "core:0",
        signal=("core:0", signal.SIGSTOP),
    ),
    Injection(
        "worker killed", _kinds("CHILD_DIED"), "worker:0", signal=("worker:0", signal.SIGKILL)
    ),
    Injection(
        "API server killed", _kinds("CHILD_DIED"), "api:0", signal=("api:0", signal.SIGKILL),
        answered=False,
    ),
    Injection(
        "worker holds the GIL", _kinds("GIL_HELD"), "worker:0", "_sem_wait",
        arm=("worker/execute_model", "hold_gil"),
    ),
    Injection(
        "engine core holds the GIL", _kinds("GIL_HELD"), "core:0", "_sem_wait",
        arm=("core/schedule", "hold_gil"),
    ),
    Injection(
        "engine core spins", _kinds("CPU_RUNAWAY"), "core:0", "spin",
        arm=("core/schedule", "spin"),
    ),
    Injection(
        "output thread stuck", _kinds("OUTPUT_BLOCKED"), "core:0", "_sem_wait",
        arm=("core/output", "block_in_c"),
    ),
    Injection(
        "event loop blocked", _kinds("FRONTEND_BLOCKED"), "api:0", "_sem_wait",
        arm=("api/loop", "block_in_c"), answered=False,
    ),
]  # fmt: skip

BAR_S = 0.25  # from a limit to confirmed
LATE_S: dict[str, float] = {}  # confirmed after the limit, by injection; starved ones left out


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervised]:
    running = Supervised(tmp_path_factory.mktemp("injections"))
    try:
        yield running
    finally:
        running.end()
    judged = [LATE_S[i.name] for i in INJECTIONS if i.arm and i.name in LATE_S]
    assert len(judged) < 3 or statistics.median(judged) <= BAR_S, LATE_S


@pytest.fixture
def chat(daemon: Supervised) -> Supervised:
    """The engine, READY, without a fault left from before, and past the steps of the compile limit."""
    daemon.faults.clear()
    daemon.ensure()
    daemon.serve_one()
    return daemon


def provoke(chat: Supervised, injection: Injection, clients: list[Client]) -> None:
    """Do the fault, and be sure that it is there.

    On a starved host the clients may have been served before it was armed: then others take their place.
    """
    if injection.arm is not None:
        chat.faults.arm(*injection.arm)
        for _ in range(6):
            with contextlib.suppress(TimeoutError):
                chat.faults.wait_done(timeout_s=10)
                return
            clients[:] = [client for client in clients if not client.done.is_set()]
            clients.append(chat.client(stream=True))
        chat.faults.wait_done(timeout_s=10)
        return
    assert injection.signal is not None
    address, number = injection.signal
    os.kill(chat.pid(address), number)


def check_answers(injection: Injection, clients: list[Client], stall: dict[str, Any]) -> None:
    """Every client ended, and with an explicit error wherever a process was left to say it."""
    for client in clients:
        assert client.done.wait(20), "a client hangs"
        error = client.error()
        if not injection.answered:
            continue  # its connection was closed; the time of that is checked below
        # vLLM's own 500, if it came first, counts too; an answer that merely ends does not.
        assert error, f"{injection.name}: ended without an error: {client.body[-500:]}"
        if error.get("failure_id"):
            assert stall["id"] == error["failure_id"]
            assert client.stream or client.status == 503
            assert client.stream or client.headers.get("x-should-retry") == "false"


def looks_late(witness: str) -> float:
    """What a report says of our own looks after its limit was extended, in seconds."""
    found = re.match(r"after that our own looks came ([0-9.]+) s late", witness)
    return float(found[1]) + 0.01 if found else 0.0  # it is rounded to two places


def wall(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def check_times(
    injection: Injection, clients: list[Client], report: dict[str, Any], ended: float
) -> None:
    confirmed = wall(report["detected_at"])
    late = report["elapsed_s"] - report["limit_s"]
    witnesses = report["host"]["witnesses"]
    if not any("extended by" in words for words in witnesses):
        LATE_S[injection.name] = late
    # An exit and a stop have no phase limit and bars of their own, 250 ms and 1 s. A starved host
    # extends the limit once; after that only what our own looks came late may delay the verdict,
    # and the report says how much that was.
    room = BAR_S if injection.arm else 1.0
    assert late <= room + sum(map(looks_late, witnesses)), report["host"]
    for client in clients:
        waited = client.ended_at - confirmed
        if injection.answered:
            assert waited <= 3.0, f"a client waited {waited:.2f} s after confirmation"
        else:
            assert client.ended_at <= ended + 1.0, "a connection outlived the kill by a second"


@pytest.mark.parametrize("injection", INJECTIONS, ids=lambda i: i.name)
def test_a_fault_becomes_verdict_failure_and_a_serving_engine(
    chat: Supervised, injection: Injection, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each fault is confirmed in time, named, answered to every client, killed and recovered from."""
    incarnation = chat.engine()["incarnation"]
    known = {s["id"] for s in chat.stalls()}
    counted = {kind: counter(chat, kind) for kind in injection.kinds}
    old = chat.member_pids()
    clients = [chat.client(stream=True), chat.client(stream=False)]
    assert clients[0].first_byte.wait(60)

    provoke(chat, injection, clients)
    stall = chat.wait_stall(known, 40)
    ours = chat.get("/healthz")[0]
    check_answers(injection, clients, stall)
    until(lambda: gone(old), seconds=40, what="the end of the old tree")
    ended = time.time()
    chat.wait_ready(incarnation + 1)
    assert chat.serve_one().status == 200
    report = until(lambda: complete(chat.report(stall["id"])), seconds=30, what="the whole report")

    with capsys.disabled():
        theirs = chat.their_health[-1] if chat.their_health else "no time to ask"
        sys.stdout.write(
            f"\n  {injection.name}: vLLM /health {theirs}, ours {ours}. {report['summary']}\n"
        )
    assert report["kind"] in injection.kinds, report["summary"]
    assert report["culprit"]["process"] == injection.process, report["summary"]
    assert injection.frame in report["culprit"]["frame"], report["culprit"]
    if report["kind"] == "CHILD_DIED":
        assert report["culprit"]["phase"], "the last phase must be known"
    assert ours == 503
    check_times(injection, clients, report, ended)
    kind = report["kind"]
    assert counter(chat, kind) == counted[kind] + 1, "metrics and ledger must agree"


def counter(chat: Supervised, kind: str) -> float:
    return chat.metric(f'stallwatch_stalls_total{{engine="chat",kind="{kind}"}}')


def complete(report: dict[str, Any]) -> dict[str, Any] | None:
    done = any("tree gone" in entry["text"] for entry in report["timeline"])
    return report if done else None


def test_an_orderly_end_nobody_asked_for_is_a_failure(chat: Supervised) -> None:
    """A stranger's SIGTERM: vLLM would end with status 0, and the daemon still counts a failure."""
    incarnation = chat.engine()["incarnation"]
    known = {s["id"] for s in chat.stalls()}
    old = chat.member_pids()

    os.kill(chat.pid("api:0"), signal.SIGTERM)
    stall = chat.wait_stall(known, 40)

    until(lambda: gone(old), seconds=40, what="the end of the old tree")
    chat.wait_ready(incarnation + 1)
    assert chat.report(stall["id"])["kind"] == "CHILD_DIED"
    assert chat.metric('stallwatch_process_exits_total{engine="chat"}') >= 1


def test_a_stop_that_was_asked_for_serves_what_is_in_flight_and_leaves_nothing(
    chat: Supervised,
) -> None:
    """SIGTERM to the daemon: running requests are completed, nothing is left, exit status 0."""
    members = chat.member_pids()
    client = chat.client(stream=False, tokens=600)
    until(lambda: pending(chat), seconds=20, what="the request in flight")

    assert chat.stop(90) == 0

    assert client.done.wait(5)
    assert client.status == 200
    assert '"completion_tokens":600' in client.body.replace(" ", "")
    assert gone(members)
    assert chat.left_behind() == set()


def pending(chat: Supervised) -> bool:
    return any(p["pending"] for p in chat.engine().get("processes", ()))
