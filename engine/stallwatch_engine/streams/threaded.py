"""Streams on a CPU: one thread each, first in first out, with events that order them truly.

torch's own events on a CPU are always complete, so whatever works with them proves nothing. These have
the semantics of an accelerator: a wait binds to the latest record at the time of the call, and failed
work poisons its stream and everybody who waits for it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

from stallwatch_engine.faults import Faults
from stallwatch_engine.streams.bounded import check_deadline, check_timeout
from stallwatch_engine.streams.errors import NotRecorded, OverContract, StreamClosed, StreamFailed
from stallwatch_engine.streams.protocol import Stream

WAIT_LIMIT_S = 600.0
MAX_ITEMS = 65536  # far beyond what the steps in flight need: a host that never waits is found out
_ABORT_POLL_S = (
    0.1  # how soon a blocked stream notices abort(); a completed wait does not wait for it
)


class Observer(Protocol):
    """Told what a stream stands at, in the stream's own thread: the seam for a heartbeat channel."""

    def begin(self, operation: str, on: str) -> None:
        """The stream enters that operation; `on` is the lane it blocks for, or empty."""

    def idle(self) -> None:
        """The stream has nothing to do."""


class _Point:
    """One record: complete, failed or neither yet."""

    __slots__ = ("_done", "error")

    def __init__(self) -> None:
        self._done = threading.Event()
        self.error: StreamFailed | None = None

    def complete(self, error: StreamFailed | None = None) -> None:
        if self._done.is_set():
            return
        self.error = error
        self._done.set()

    def done(self) -> bool:
        return self._finish(self._done.is_set())

    def wait(self, seconds: float) -> bool:
        return self._finish(self._done.wait(max(0.0, seconds)))

    def _finish(self, complete: bool) -> bool:
        if complete and self.error is not None:
            raise self.error
        return complete


@dataclass(frozen=True, slots=True)
class _Item:
    operation: str
    work: Callable[[], None]
    on: str = ""
    point: _Point | None = None  # of a record: completed even when the stream has failed


class ThreadedStream:
    """A FIFO thread. `wait_limit_s` bounds every wait for another stream's event."""

    def __init__(
        self, name: str, *, observer: Observer | None = None, wait_limit_s: float = WAIT_LIMIT_S
    ) -> None:
        self._name = name
        self._observer = observer
        self._wait_limit_s = check_timeout(wait_limit_s, "wait_limit_s")
        self._items: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # orders enqueue against close
        self._closed = False
        self._aborted = False
        self._failure: StreamFailed | None = None
        self._at = ""
        self._thread = threading.Thread(target=self._run, name=f"stream-{name}", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return self._name

    @property
    def at(self) -> str:
        """The operation that runs now, or empty."""
        return self._at

    def enqueue(self, operation: str, work: Callable[[], None], *, on: str = "") -> None:
        self.check()
        self._put(_Item(operation, work, on))

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def synchronize(self, deadline: float) -> None:
        check_deadline(deadline)
        began = time.monotonic()
        point = self.mark()
        if not point.wait(deadline - began):
            raise TimeoutError(
                f"stream {self._name} did not finish within {deadline - began:.3g} s: it stands at {self._at or 'nothing'}"
            )

    def close(self, timeout_s: float) -> None:
        check_timeout(timeout_s)
        with self._lock:
            if not self._closed:
                self._closed = True
                self._items.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(
                f"stream {self._name} did not end within {timeout_s:g} s: it stands at {self._at or 'nothing'}"
            )

    def abort(self) -> None:
        """Run nothing more, give up waits for events, fail what waits for this stream. Then close()."""
        self._aborted = True

    def mark(self, faults: Faults | None = None, name: str = "") -> _Point:
        """A point after everything enqueued so far. Works on a failed stream: the point fails."""
        point = _Point()
        fault = faults.event(name) if faults else None
        if fault == "never":
            return point
        if fault == "wrong":  # says done before the work before it ran
            point.complete()
            return point
        late_s = faults.late_s if faults and fault == "late" else 0.0

        def complete() -> None:
            if late_s:
                _later(late_s, point)
            else:
                point.complete()

        self._put(_Item("record", complete, "", point))
        return point

    def hold(self, point: _Point, on: str = "") -> None:
        """Run nothing more until the point is complete."""
        self.check()
        self._put(_Item("wait_event", lambda: self._block(point), on))

    def _block(self, point: _Point) -> None:
        deadline = time.monotonic() + self._wait_limit_s
        while not point.wait(_ABORT_POLL_S):
            if self._aborted:
                raise StreamClosed(self._name)
            if time.monotonic() >= deadline:
                raise TimeoutError(f"the event did not complete within {self._wait_limit_s:g} s")

    def _put(self, item: _Item) -> None:
        with self._lock:
            if self._closed:
                raise StreamClosed(self._name)
            if self._items.qsize() >= MAX_ITEMS:
                raise OverContract(f"operations enqueued on stream {self._name}", MAX_ITEMS)
            self._items.put(item)

    def _run(self) -> None:
        seen = self._observer
        while True:
            if seen is not None and self._items.empty():
                seen.idle()
            item = self._items.get()
            if item is None:
                return
            if seen is not None and item.point is None:
                seen.begin(item.operation, item.on)
            self._at = item.operation
            self._do(item)
            self._at = ""

    def _do(self, item: _Item) -> None:
        try:
            if self._failure is None:
                if self._aborted:
                    raise StreamClosed(self._name)
                item.work()
        except BaseException as error:  # whatever work raises belongs to who waits for it
            self._failure = StreamFailed(self._name, item.operation, error)
        if item.point is not None and self._failure is not None:
            item.point.complete(self._failure)


class ThreadedEvent:
    """A point in a threaded stream. One recorder at a time; any number of waiters."""

    def __init__(self, name: str = "event", *, faults: Faults | None = None) -> None:
        self._name = name
        self._faults = faults
        self._point: _Point | None = None

    def record(self, stream: Stream) -> None:
        self._point = cast("ThreadedStream", stream).mark(self._faults, self._name)

    def wait(self, stream: Stream, *, on: str = "") -> None:
        cast("ThreadedStream", stream).hold(self._latest(), on)

    def query(self) -> bool:
        return self._latest().done()

    def synchronize(self, deadline: float, operation: str) -> None:
        check_deadline(deadline)
        point = self._latest()
        seconds = deadline - time.monotonic()
        if not point.wait(seconds):
            raise TimeoutError(f"{operation} did not complete within {max(0.0, seconds):.3g} s")

    def _latest(self) -> _Point:
        if self._point is None:
            raise NotRecorded(f"{self._name} was never recorded")
        return self._point


def _later(seconds: float, point: _Point) -> None:
    timer = threading.Timer(seconds, point.complete)
    timer.daemon = True
    timer.start()
