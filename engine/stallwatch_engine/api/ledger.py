"""The request ledger: every request ends in exactly one answer, and the ledger says which.

Worker output, a worker's FAILURE, a process death, the supervisor's FAILURE, the deadline and the
client's hang-up race for it. `settle` is the compare-and-set: the first one wins, every later one is
dropped and counted. Pure: no clock, no I/O, no locks; it belongs to the event loop's thread.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from stallwatch_engine.api.errors import ApiError


class Source(enum.StrEnum):
    """Who may end a request."""

    OUTPUT = "output"
    WORKER_FAILURE = "worker_failure"
    PROCESS_DEATH = "process_death"
    BOARD_FAILURE = "board_failure"
    DEADLINE = "deadline"
    DISCONNECT = "disconnect"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True)
class Answer:
    """The one terminal answer: either a finish reason or an error."""

    source: Source
    finish: str | None = None
    error: ApiError | None = None

    def __post_init__(self) -> None:
        if (self.finish is None) == (self.error is None):
            raise ValueError("an answer has either a finish reason or an error")


class NeverOpened(LookupError):
    """An id that this ledger never gave: whoever used it is broken."""


@dataclass(slots=True)
class Ledger:
    """Ids count up from 1 and are never used again, so a settled request needs no memory."""

    settled: Counter[Source] = field(default_factory=Counter)
    late: Counter[Source] = field(default_factory=Counter)
    _waiting: dict[int, None] = field(default_factory=dict)  # in the order of arrival
    _next: int = 1

    def open(self) -> int:
        """A new request, waiting for its answer."""
        request, self._next = self._next, self._next + 1
        self._waiting[request] = None
        return request

    def settle(self, request: int, source: Source) -> bool:
        """True for the one caller whose answer counts; otherwise the answer is late and counted."""
        if request in self._waiting:
            del self._waiting[request]
            self.settled[source] += 1
            return True
        self.drop(request, source)
        return False

    def drop(self, request: int, source: Source) -> None:
        """Count something that came for a request after its end. NeverOpened if it never began."""
        if not 0 < request < self._next:
            raise NeverOpened(f"request {request} was never opened")
        if request in self._waiting:
            raise ValueError(f"request {request} is still waiting")
        self.late[source] += 1

    def is_waiting(self, request: int) -> bool:
        return request in self._waiting

    def __len__(self) -> int:
        """How many requests wait for their answer."""
        return len(self._waiting)

    def __iter__(self) -> Iterator[int]:
        """The waiting ones, oldest first; settling while iterating is allowed."""
        return iter(list(self._waiting))
