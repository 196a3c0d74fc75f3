"""What the judge is given: engines, their boards, host facts. Protocols only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from stallwatch.board.image import BoardImage
from stallwatch.clock import Clock
from stallwatch.watch.notice import Notice
from stallwatch.watch.policy import Policy
from stallwatch.watch.snapshot import EngineFacts, Exit, HostFacts


class Board(Protocol):
    """A reader of one incarnation's board."""

    def look(self, clock: Clock) -> BoardImage | None:
        """What the board says now; None when it cannot be read."""
        ...


class Host(Protocol):
    """Host witnesses."""

    def facts(self, now_ns: int, *, late_ns: int = 0) -> HostFacts: ...


class WatchedEngine(Protocol):
    """One engine as the daemon shows it. Every method is called from the judging thread and must
    return at once: values prepared elsewhere, no file, no lock that is held over I/O.
    """

    @property
    def name(self) -> str: ...

    @property
    def reader(self) -> Board | None:
        """The present incarnation's board; None while there is none."""
        ...

    def facts(self) -> EngineFacts:
        """State and times; the watch fills the side progress."""
        ...

    def members(self) -> Mapping[int, int]:
        """Living members: start ticks by pid."""
        ...

    def exits(self) -> tuple[Exit, ...]:
        """Every exit of this incarnation so far, oldest first."""
        ...

    def policy(self) -> Policy: ...

    def our_tools(self) -> frozenset[int]:
        """Pids of our own py-spy children: their tracing is no debugger."""
        ...


Sink = Callable[[str, Notice], None]  # (engine name, notice); must return at once
