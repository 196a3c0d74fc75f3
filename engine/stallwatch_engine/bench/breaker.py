"""The circuit breaker as a pure table: may another request be sent? Once open it stays open."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from stallwatch_engine.bench.timeouts import TimeoutKind


class State(StrEnum):
    CLOSED = "closed"  # requests are sent
    TRIPPED = "tripped"  # a structural timeout opened it
    INTERRUPTED = "interrupted"  # a person did


@dataclass(frozen=True, slots=True)
class TimedOut:
    """A request met a structural timeout."""

    request: int
    kind: TimeoutKind


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Ctrl-C, or SIGTERM."""


Event = TimedOut | Interrupted


@dataclass(frozen=True, slots=True)
class Breaker:
    """fail_fast: whether a timeout opens it. cause: the timeout that did, the first one."""

    fail_fast: bool = False
    state: State = State.CLOSED
    cause: TimedOut | None = None

    @property
    def sends(self) -> bool:
        """Whether another request may be sent."""
        return self.state is State.CLOSED

    def step(self, event: Event) -> Breaker:
        """The breaker after an event. Total: the first cause stays, everything later changes nothing."""
        if not self.sends:
            return self
        if isinstance(event, Interrupted):
            return replace(self, state=State.INTERRUPTED)
        if self.fail_fast:
            return replace(self, state=State.TRIPPED, cause=event)
        return self
