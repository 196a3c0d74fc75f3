"""A bounded queue and one thread that delivers from it. Whoever offers is never held up."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from stallwatch.hooks.notice import Notice

ABORT_S = 2.0  # after the abort, a delivery has this long to come back


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a delivery went; `problem` is one sentence, '' for success."""

    problem: str = ""
    attempts: int = 1


# Returns when it is done or soon after the event is set, and raises nothing that it can foresee.
Deliver = Callable[[Notice, threading.Event], Outcome]
Tell = Callable[[str, str, str], object]  # engine, type of event, words


class Worker:
    """Notices in order, one at a time. What finds the queue full is dropped, counted and told."""

    def __init__(self, name: str, deliver: Deliver, tell: Tell, *, capacity: int) -> None:
        self.name = name
        self.dropped = 0
        self._deliver = deliver
        self._tell = tell
        self._capacity = capacity
        self._queue: deque[Notice] = deque()
        self._changed = threading.Condition()
        self._told_dropped = 0
        self._closing = False
        self._busy = False
        self._abort = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"stallwatch-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def offer(self, notice: Notice) -> bool:
        """Queue it, at once; False: dropped."""
        with self._changed:
            if len(self._queue) >= self._capacity:
                self.dropped += 1
                return False
            self._queue.append(notice)
            self._changed.notify()
            return True

    def stop(self, patience_s: float) -> int:
        """Deliver what is queued for at most `patience_s`, then abort. Returns how many were not."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(patience_s)
            self._abort.set()
            self._thread.join(ABORT_S)
        with self._changed:
            return len(self._queue) + self._busy

    def idle(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or under way."""
        until = time.monotonic() + timeout_s
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._queue and not self._busy, until - time.monotonic()
            )

    def _run(self) -> None:
        while (notice := self._next()) is not None:
            self._one(notice)
            with self._changed:
                # aborted: this one is told as undelivered by its own problem
                self._busy = False
                self._changed.notify_all()

    def _next(self) -> Notice | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            if not self._queue or self._abort.is_set():
                return None
            self._busy = True
            return self._queue.popleft()

    def _one(self, notice: Notice) -> None:
        try:
            outcome = self._deliver(notice, self._abort)
        except Exception as error:
            # The next notice must still go out. The type alone: the words might hold the URL.
            outcome = Outcome(f"{type(error).__name__} while delivering")
        about = f"{self.name}: {notice.event} {notice.failure.get('id', '')}".rstrip()
        if outcome.problem:
            self._tell(notice.engine, "fault", f"{about} was not delivered: {outcome.problem}")
        else:
            tries = f" at attempt {outcome.attempts}" if outcome.attempts > 1 else ""
            self._tell(notice.engine, "hook", f"{about} was delivered{tries}")
        lost = self.dropped - self._told_dropped
        if lost:
            self._told_dropped += lost
            self._tell("", "fault", f"{self.name}: {lost} notices were dropped, the queue was full")
