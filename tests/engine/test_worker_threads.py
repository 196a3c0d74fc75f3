"""The worker's listener in front of a scheduler that stands still."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

from stallwatch.heartbeat import attach
from stallwatch_engine.worker import threads
from stallwatch_engine.worker.threads import MOST_UNREAD, WireThread


class Flood:
    """An api that always has one more message; it counts how often it was asked."""

    def __init__(self) -> None:
        self.given = 0

    def receive(self, timeout_s: float) -> list[Any]:
        self.given += 1
        return [object()]


def test_a_scheduler_that_stands_still_is_not_buried_in_messages() -> None:
    """The listener stops reading at its bound, and goes on once the scheduler took something."""
    flood, inbox = Flood(), queue.SimpleQueue()
    full = threading.Event()

    class Watched:
        def wait(self, *_: Any, **__: Any) -> None:
            full.set()

        def idle(self, *_: Any, **__: Any) -> None:
            pass

        def close(self) -> None:
            pass

    WireThread(flood, inbox, Watched)  # type: ignore[arg-type]
    assert full.wait(10)
    assert inbox.qsize() == MOST_UNREAD
    inbox.get()
    deadline = time.monotonic() + 10
    while flood.given < MOST_UNREAD + 1:
        assert time.monotonic() < deadline
    assert inbox.qsize() <= MOST_UNREAD
    flood.receive = lambda _: (_ for _ in ()).throw(threads.WireError("the end"))  # type: ignore[method-assign]
    while flood.given and not isinstance(inbox.get(timeout=10), threads.ApiEnded):
        pass


def test_the_lane_has_what_the_listener_calls() -> None:
    """The real lane takes the same calls as the stand-in above."""
    lane = attach(role="worker", dump_signal=0).lane("wire")
    lane.wait("inbox_full", on="worker:0/scheduler")
    lane.idle(on="api:0/loop")
    lane.close()
