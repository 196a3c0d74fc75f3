"""An engine for the judge whose every answer a test sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stallwatch.board.image import BoardImage
from stallwatch.clock import Clock
from stallwatch.lifecycle.states import State
from stallwatch.watch.policy import Policy
from stallwatch.watch.snapshot import EngineFacts, Exit
from stallwatch.watch.sources import Board


@dataclass
class StillBoard:
    """A board that always shows the same image; None: it cannot be read."""

    image: BoardImage | None = None
    error: Exception | None = None

    def look(self, clock: Clock) -> BoardImage | None:
        if self.error is not None:
            raise self.error
        return self.image


@dataclass
class FakeEngine:
    """Implements stallwatch.watch.sources.WatchedEngine."""

    name: str = "chat"
    reader: Board | None = None
    now: EngineFacts = field(default_factory=lambda: EngineFacts("chat", 1, State.READY))
    pids: Mapping[int, int] = field(default_factory=dict)
    ended: tuple[Exit, ...] = ()
    limits: Policy = field(default_factory=Policy)
    tools: frozenset[int] = frozenset()
    error: Exception | None = None

    def facts(self) -> EngineFacts:
        if self.error is not None:
            raise self.error
        return self.now

    def members(self) -> Mapping[int, int]:
        return self.pids

    def exits(self) -> tuple[Exit, ...]:
        return self.ended

    def policy(self) -> Policy:
        return self.limits

    def our_tools(self) -> frozenset[int]:
        return self.tools
