"""The stand-in of the Code2Wav stage under the real daemon, stalled in every step in turn."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import code2wav_standin
from daemon_helpers import Daemon, daemon, place, until
from stallwatch_engine.vllm_plugin import omni_map

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(180)]

STANDIN = Path(code2wav_standin.__file__)
ROOTS = [str(STANDIN.parents[1] / root) for root in ("supervisor", "engine")]
LIMIT_S = 1.0
STEPS = sorted({row.phase for row in omni_map.rows()} | {"cfm_ragged"})


def engine(folder: Path, **env: str) -> dict[str, Any]:
    """The stand-in, only observed: one engine takes all stalls in turn."""
    return {
        "command": [sys.executable, str(STANDIN), str(folder)],
        "env": {"PYTHONPATH": os.pathsep.join(ROOTS), "OMP_NUM_THREADS": "1", **env},
        "port": None,
        "plugin": "off",
        "enforce": "observe",
        "limits": {"default": "300s", "compile": "300s", "start": "120s", "no_progress": "300s"},
    }


@pytest.fixture(scope="module")
def running() -> Iterator[Daemon]:
    """One daemon with a limit of one second for each step."""
    with (
        place() as folder,
        daemon(folder, engine(folder, STALLWATCH_CODE2WAV=f"{LIMIT_S}")) as found,
    ):
        found.wait_ready()
        warm(found)
        yield found


def warm(running: Daemon) -> None:
    """Past the first steps after READY, which may compile."""

    begun = work(running)
    running.wait(lambda: work(running) > begun + 50, "steps")


def work(running: Daemon) -> int:
    """How many chunks were decoded."""
    return sum(int(lane["work"]) for lane in running.engine()["lanes"])


def stands(report: dict[str, Any]) -> bool:
    """Is the frame there? On a busy machine only one of the later samples may hold it."""
    frames = [f for s in report["stacks"] for t in s["threads"] for f in t["frames"]]
    return any(frame.startswith("gate (") for frame in frames)


def stalled(running: Daemon, step: str) -> dict[str, Any]:
    """The report of a stall in that step, the engine moving again afterwards."""
    known = {each["id"] for each in running.stalls()}
    running.hold_again()
    running.order("worker", step)
    try:
        found = running.wait_stall(known)
        running.wait(lambda: stands(running.report(found["id"])), "the frame in which it stands")
        return running.report(found["id"])
    finally:
        running.release()
        running.wait_state("ready")


@pytest.mark.parametrize("step", STEPS)
def test_a_stalled_step_is_named_with_its_stack(running, step):
    """The culprit is the worker in that step, over that step's own limit, with the frame it stands in."""
    report = stalled(running, step)
    culprit = report["culprit"]
    assert (culprit["process"], culprit["lane"]) == ("worker:0", "worker:0/main")
    assert culprit["phase"] == step
    assert report["limit_s"] == LIMIT_S
    assert report["elapsed_s"] < 3.0
    (lane,) = [x for p in report["processes"] for x in p["lanes"]]
    assert lane["phase"] == step
    assert [outer["phase"] for outer in lane["outer"]] == ["execute_model"]
    assert stands(report)


def test_details_are_those_of_the_stalled_step(running):
    """The sizes of the encoder's step, and none of the setup before it."""
    report = stalled(running, "encoder")
    (lane,) = [x for p in report["processes"] for x in p["lanes"]]
    assert lane["details"] == {"batch": 2, "frames": code2wav_standin.CHUNK}


def test_one_stalled_operation_is_told_once(running):
    """However many limits it stands there: one report."""
    report = stalled(running, "hift")
    known = {each["id"] for each in running.stalls()}
    assert report["id"] in known
    running.hold_again()
    running.order("worker", "hift")
    running.wait(lambda: len(running.stalls()) == len(known) + 1, "one report")
    began = running.engine()["lanes"][0]["age_s"]
    running.wait(lambda: running.engine()["lanes"][0]["age_s"] > began + 3.0, "three more limits")
    assert len(running.stalls()) == len(known) + 1
    running.release()
    running.wait_state("ready")


def test_a_long_operation_of_short_steps_is_no_stall(running):
    """Each step has its whole limit: a chunk that takes several of them is not reported."""
    running.wait_state("ready")
    known = len(running.stalls())
    (running.folder / "drag").touch()
    try:
        running.wait(lambda: running.engine()["lanes"][0]["age_s"] > 0.3, "a slow step")
        begun, since = work(running), time.monotonic()
        running.wait(lambda: work(running) >= begun + 2, "two slow chunks", seconds=60)
        assert time.monotonic() - since > 3 * LIMIT_S
        assert len(running.stalls()) == known
    finally:
        (running.folder / "drag").unlink()


def test_without_the_switch_nothing_is_marked():
    """Off by default: no lane ever enters a step, and a stalled step is the RPC's matter."""
    with place() as folder, daemon(folder, engine(folder)) as found:
        found.wait_ready()
        found.order("worker", "encoder")
        until(lambda: not (folder / "worker.order").exists(), what="the step stands")

        def standing() -> str:
            (lane,) = found.engine()["lanes"]
            return str(lane["phase"]) if lane["age_s"] > 0.5 else ""

        assert found.wait(standing, "a lane that stands") == "execute_model"
        found.release()
