"""What an engine wrote on its board is shown without secrets."""

from __future__ import annotations

import dataclasses

import pytest

from stallwatch.board.image import BoardImage, LaneClass, LaneImage, PhaseFrame, ProcessImage
from stallwatch.daemon import views
from stallwatch.daemon.events import EventRing
from stallwatch.diagnosis.kinds import Kind
from stallwatch.evidence.redact import MASK, Redactor
from stallwatch.lifecycle.budget import Budget, Pace
from stallwatch.lifecycle.engine import After, EngineState
from stallwatch.lifecycle.events import Event, EventKind
from stallwatch.lifecycle.machine import step
from stallwatch.lifecycle.states import State
from stallwatch.testing.clock import FakeClock
from stallwatch.watch.policy import Policy
from stallwatch.watch.snapshot import EngineFacts, ProcFacts, Snapshot


def look(said: str) -> Snapshot:
    frame = PhaseFrame(said, LaneClass.WORK, 1, 1, 0)
    lane = LaneImage(
        0, 100, 100, 1, "worker", 0, said, False, (frame,), 1, 1, said, ((said, 4),), said
    )
    image = BoardImage(1, 2, (ProcessImage(0, 100, 1, "worker", 0, True, 0, 0),), (lane,))
    facts = {100: ProcFacts(100, 1, 1, said, "S", 1, 0, 1, 1)}
    return Snapshot(2, EngineFacts("chat", 1, State.READY), image, facts)


@pytest.mark.parametrize(
    ("said", "known"),
    [
        ("api_key=s3cretvalue", ()),
        ("\x1b[1mapi_key\x1b[0m=s3cretvalue", ()),
        ("with s3cretvalue", ("s3cretvalue",)),
    ],
)
def test_lanes_and_processes_are_shown_without_secrets(said: str, known: tuple[str, ...]) -> None:
    """Phase, text, wait_on, details and names, whether the value is known or only looks like one."""
    redactor = Redactor(known)
    (lane,) = views.lanes(look(said), Policy(), 3, redactor)
    (process,) = views.processes(look(said), {100: 1}, redactor)
    assert "s3cretvalue" not in repr((dataclasses.asdict(lane), dataclasses.asdict(process)))
    assert all(MASK in each for each in (lane.phase, lane.text, lane.wait_on, process.comm))


def test_events_are_without_secrets_from_the_start() -> None:
    """Readers and sinks alike: what is named a secret, and what that engine was given as one."""
    heard: list[str] = []
    ring = EventRing(FakeClock(), sinks=[lambda e: heard.append(repr((e.message, e.data)))])
    ring.redactors["chat"] = Redactor(["plainwords"])
    ring.emit("chat", "stall", "plainwords api_key=s3cretvalue", culprit="plainwords", pid=7)
    ring.emit("other", "stall", "plainwords", pid=8)
    assert not any(word in heard[0] for word in ("plainwords", "s3cretvalue"))
    assert [e.message for e in ring.after(0)] == [f"{MASK} api_key={MASK}", "plainwords"]
    assert [e.data["pid"] for e in ring.after(0)] == [7, 8]


def test_lanes_and_processes_stand_as_people_count() -> None:
    """worker:2 comes before worker:10, in the list of lanes and in that of processes."""
    frame = PhaseFrame("step", LaneClass.WORK, 1, 1, 0)
    ranks = (10, 2, 1)
    image = BoardImage(
        1,
        2,
        tuple(ProcessImage(r, r, 1, "worker", r, True, 0, 0) for r in ranks),
        tuple(
            LaneImage(r, r, r, 1, "worker", r, "main", False, (frame,), 1, 1, "", (), "")
            for r in ranks
        ),
    )
    facts = {r: ProcFacts(r, 1, 1, "python", "S", 1, 0, 1, 1) for r in ranks}
    found = Snapshot(2, EngineFacts("chat", 1, State.READY), image, facts)

    lanes = [lane.address for lane in views.lanes(found, Policy(), 3)]
    assert lanes == ["worker:1/main", "worker:2/main", "worker:10/main"]
    processes = [each.address for each in views.processes(found, dict.fromkeys(ranks, 1))]
    assert processes == ["worker:1", "worker:2", "worker:10"]


ONE_LEFT, NONE_LEFT = Budget(), Budget(stamps=(5,), pace=Pace(limit=1))


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (EngineState(State.BACKOFF, wanted=True), True),
        (EngineState(State.FAILED, wanted=True, up=True, after=After.RESTART), True),
        (EngineState(State.FAILED, wanted=True, up=True, after=After.AGAIN), True),
        (EngineState(State.FAILED, wanted=True, up=True, after=After.FAIL), False),
        (EngineState(State.FAILED, wanted=True, up=False, after=After.RESTART), False),
        (EngineState(State.STALLED, wanted=True, up=True, after=After.RESTART), True),
        (
            EngineState(
                State.STALLED, wanted=True, up=True, after=After.RESTART, enforce="observe"
            ),
            False,
        ),
        (
            EngineState(State.FAILED, wanted=True, up=True, after=After.RESTART, budget=NONE_LEFT),
            False,
        ),
        (EngineState(State.EXHAUSTED, wanted=True), False),
        (EngineState(State.READY, wanted=True, up=True, after=After.FAIL), False),
    ],
)
def test_whether_an_engine_comes_back_by_itself(state: EngineState, expected: bool) -> None:
    """Only what the life table will start again without anybody's help."""
    assert views.comes_back(state, 10) is expected


@pytest.mark.parametrize(("policy", "expected"), [("by-kind", True), ("never", False)])
def test_coming_back_is_what_the_life_table_does(policy: str, expected: bool) -> None:
    """An exit nobody asked for, then the end of the tree: the promise made before is kept."""
    state = EngineState(
        State.READY, wanted=True, up=True, ready=True, policy=policy, budget=ONE_LEFT
    )
    state, _ = step(state, Event(EventKind.EXITED, stall=Kind.CHILD_DIED), 10)
    assert views.comes_back(state, 11) is expected
    state, _ = step(state, Event(EventKind.TREE_GONE), 12)
    assert views.comes_back(state, 13) is expected
    assert state.state is (State.BACKOFF if expected else State.FAILED)
