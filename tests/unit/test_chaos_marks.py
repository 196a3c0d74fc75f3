"""At which marks a process takes an order, and which of its lanes are offered for one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stallwatch.board.image import LaneClass
from stallwatch.chaos import desk
from stallwatch.chaos.inject import working
from stallwatch.heartbeat import chaos as hook
from stallwatch.heartbeat.proc import start_ticks
from stallwatch.testing.snapshots import facts, frame, lane, process, snapshot
from stallwatch.watch.policy import Policy

STEM = f"{os.getpid()}-{start_ticks(os.getpid())}"


class Lane:
    """What the hook sees of a lane, and no board."""

    def __init__(self, name: str) -> None:
        self.name = name

    def marker(self, phase: str, *details: str, cls: str = "work", on: str = "") -> Any:
        return lambda *values: None

    def enter(self, phase: str, /, cls: str = "work") -> None:
        pass


@pytest.fixture
def armed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Lane]:
    """Lanes whose marks look for orders in tmp_path."""
    gate = hook.Gate(str(tmp_path))
    monkeypatch.setattr(Lane, "marker", hook._making(Lane.marker, gate))
    monkeypatch.setattr(Lane, "enter", hook._direct(Lane.enter, gate))
    return Lane


def order(folder: Path, name: str = "") -> Path:
    """A harmless order for one lane; the file that says that it was taken."""
    said = {"fault": "slow", "lane": name, "seconds": 0.0, "delay_s": 0.0}
    (folder / f"{STEM}.order").write_text(json.dumps(said))
    return folder / f"{STEM}.began"


@pytest.mark.parametrize("cls", ["idle", "wait", "pause", "stop"])
def test_a_mark_that_is_no_work_takes_no_order(armed: type[Lane], tmp_path: Path, cls: str) -> None:
    """A lane that says that it waits would have its fault told as somebody else's; work takes it."""
    began = order(tmp_path)
    armed("model").marker("step", cls=cls)(1)
    armed("model").enter("step", cls)
    assert not began.exists()
    armed("model").marker("step")(1)
    assert began.exists()


def test_a_lane_whose_marks_always_come_second_takes_its_order(
    armed: type[Lane], tmp_path: Path
) -> None:
    """How often orders are looked for is counted for each lane: a busy one takes no other's turn."""
    began = order(tmp_path, "output")
    armed("model").enter("step")
    assert not began.exists()
    armed("output").enter("deliver")
    assert began.exists()


def test_lanes_that_work_are_made_known_once(armed: type[Lane], tmp_path: Path) -> None:
    """The supervisor reads which lanes have entered a working phase; a start is none."""
    for _ in range(3):
        armed("model").enter("step")
        armed("copy").marker("wait_event", cls="wait")()
        armed("loader").enter("load", "start")
        armed("output").marker("deliver")()
    assert (tmp_path / f"{STEM}.armed").read_text() == "model\noutput\n"
    assert working(tmp_path, STEM) == {"model", "output"}


def test_what_cannot_be_read_makes_no_lane_known(tmp_path: Path) -> None:
    """No folder, no file, a link, a pipe without a writer: nothing is followed or waited for."""
    (tmp_path / "secret").write_text("model\n")
    (tmp_path / "1-1.armed").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "2-1.armed")
    assert [working(tmp_path, stem) for stem in ("0-1", "1-1", "2-1")] == [set()] * 3
    assert working(None, "1-1") == set()


def serving(folder: Path | None) -> Any:
    """A worker that serves: at this look one lane waits and the other rests, both have worked."""
    lanes = [
        lane("model", frame("idle", LaneClass.IDLE), pid=2, work=9),
        lane("copier", frame("inputs_copied", LaneClass.WAIT, limit=50.0), pid=2, work=9),
    ]
    look = snapshot(1000.0, lanes, processes=[process("worker", 0, pid=2)], procs=[facts(2)])
    return SimpleNamespace(
        number=1,
        chaos_folder=folder,
        latest=lambda: look,
        members=lambda: {2: 1},
        policy=lambda: Policy(default_ns=int(4e9)),
    )


def test_a_lane_that_enters_working_phases_is_chosen(tmp_path: Path) -> None:
    """Whatever the seed: only the lane that the process made known; a lane by name is still its own."""
    (tmp_path / "2-1.armed").write_text("model\n")
    wishes = [desk.Wish("block", "worker:0", seed) for seed in range(20)]
    assert {desk.aimed(wish, serving(tmp_path))[1].lane for wish in wishes} == {"model"}
    named = desk.aimed(desk.Wish("block", "worker:0/copier"), serving(tmp_path))
    assert named[1].lane == "copier"
    assert {desk.aimed(wish, serving(None))[1].lane for wish in wishes} == {"model", "copier"}


def test_the_limit_of_a_wait_is_not_the_one_to_break(tmp_path: Path) -> None:
    """The lane waits at this look, with a limit of its own: a working phase has the default."""
    given, _ = desk.aimed(desk.Wish("block", "worker:0/copier"), serving(tmp_path))
    assert given.seconds == 14.0
