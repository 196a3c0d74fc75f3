"""Streams and events as the engine sees them: an ordered queue of work, and points in it.

Two implementations: `threaded` (CPU, a thread per stream, true ordering) and `accelerator` (thin, over
torch). Deadlines are seconds on time.monotonic().
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Stream(Protocol):
    """Work that runs in the order in which it was enqueued."""

    @property
    def name(self) -> str: ...

    def enqueue(self, operation: str, work: Callable[[], None], *, on: str = "") -> None:
        """Run `work` after everything enqueued before. Returns at once on a CPU stream.

        `on` names the lane that the work blocks for, if it blocks. On an accelerator `work` runs in
        the caller and what it launches is ordered; a blocking host wait then blocks the caller.
        Raises StreamFailed when earlier work failed, StreamClosed after close().
        """

    def check(self) -> None:
        """Raise StreamFailed if work on this stream failed."""

    def synchronize(self, deadline: float) -> None:
        """Wait until everything enqueued so far ran; TimeoutError naming what it stands at."""

    def close(self, timeout_s: float) -> None:
        """Finish what is enqueued, then end; TimeoutError naming the operation that does not."""


class Event(Protocol):
    """A point in a stream. Recording again moves the event, and nobody's earlier wait."""

    def record(self, stream: Stream) -> None:
        """From now on the event means: everything enqueued on `stream` so far has run."""

    def wait(self, stream: Stream, *, on: str = "") -> None:
        """Hold `stream` until the record that is the LATEST NOW has run. NotRecorded if there is none."""

    def query(self) -> bool:
        """Has the latest record run? StreamFailed if it never will; NotRecorded if there is none."""

    def synchronize(self, deadline: float, operation: str) -> None:
        """Block this thread until query() is true; TimeoutError naming the operation."""
