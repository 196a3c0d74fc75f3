"""READY is told together with what the engine says of itself, not before."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from stallwatch.board.image import BoardImage, LaneClass, LaneImage, PhaseFrame, ProcessImage
from stallwatch.config import EngineConfig
from stallwatch.daemon.readiness import LOOK_NS, Readiness
from stallwatch.lifecycle.states import State
from stallwatch.watch.snapshot import EngineFacts, Snapshot

LATER = LOOK_NS + 1


def look(now_ns: int, *, attached: bool, ready: bool = True) -> Snapshot:
    """One look: nobody there yet, or one process with a lane."""
    frame = PhaseFrame("wait", LaneClass.IDLE, 1, 1, 0)
    lane = LaneImage(0, 100, 100, 1, "api", 0, "loop", False, (frame,), 1, 1, "")
    process = ProcessImage(0, 100, 1, "api", 0, ready, 0, 0)
    image = BoardImage(1, now_ns, (process,), (lane,)) if attached else BoardImage(1, now_ns)
    return Snapshot(now_ns, EngineFacts("chat", 1, State.STARTING), image, {})


class Starting:
    """An engine whose looks a test gives, one after the other; the last one stays."""

    def __init__(self, *looks: Snapshot) -> None:
        self.looks = list(looks)
        self.last: Snapshot | None = None
        self.ended = threading.Event()

    def latest(self) -> Snapshot | None:
        if self.looks:
            self.last = self.looks.pop(0)
        else:
            self.ended.set()
        return self.last

    def members(self) -> object:
        return not self.ended.is_set()

    def age_s(self) -> float:
        return 60.0

    def pids(self) -> list[int]:
        import os

        return [os.getpid()]


@pytest.fixture
def port() -> Iterator[int]:
    """A port on which this process listens, as the engine would."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock.getsockname()[1]


def told(port: int, *looks: Snapshot) -> list[Snapshot | None]:
    """The looks that stood when READY was told: none or one."""
    engine = Starting(*looks)
    found: list[Snapshot | None] = []
    config = EngineConfig.model_construct(command=("x",), port=port)
    readiness = Readiness(
        engine, config, lambda: found.append(engine.last), lambda _: None, now_ns=lambda: 1000
    )
    readiness.wait(threading.Event())
    return found


def test_a_look_from_before_the_engine_attached_makes_nobody_ready(port):
    """The port listens already, the look is older: READY waits for the look that has the lanes."""
    old, fresh = look(900, attached=False), look(1000 + LATER, attached=True)
    assert told(port, old, old, fresh) == [fresh]


def test_a_look_that_is_hardly_younger_does_not_count(port):
    """Its board was read before its own time."""
    near, fresh = look(1001, attached=False), look(1000 + LATER, attached=True)
    assert told(port, near, near, fresh) == [fresh]


def test_who_attached_meanwhile_and_is_not_ready_is_waited_for(port):
    """Nothing was missing a moment ago; the younger look has a process that still starts."""
    old = look(900, attached=False)
    starting = look(1000 + LATER, attached=True, ready=False)
    fresh = look(1000 + 2 * LATER, attached=True)
    assert told(port, old, starting, fresh, fresh) == [fresh]


def test_an_engine_without_heartbeats_is_ready_by_its_port(port):
    """Nobody attaches: the younger look says so too, and that is enough."""
    fresh = look(1000 + LATER, attached=False)
    assert told(port, look(900, attached=False), fresh) == [fresh]
