"""Everything that decides about one engine, as one immutable value."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from stallwatch.lifecycle.budget import Budget
from stallwatch.lifecycle.states import State

Enforce = Literal["observe", "fail", "restart"]
Policy = Literal["by-kind", "always", "never"]


class After(StrEnum):
    """What follows once the present tree is gone."""

    STOP = "stop"
    FAIL = "fail"  # stay down
    RESTART = "restart"  # after a failure: the budget decides
    AGAIN = "again"  # an operator asked: at once


@dataclass(frozen=True, slots=True)
class EngineState:
    """wanted, up and ready are separate facts: what the operator asked for, whether a member of
    the tree may live, and whether the engine itself said that it serves.
    """

    state: State = State.STOPPED
    wanted: bool = False
    up: bool = False
    ready: bool = False
    spawning: bool = False  # a spawn was ordered and not yet answered
    incarnation: int = 0
    budget: Budget = field(default_factory=Budget)
    enforce: Enforce = "restart"
    policy: Policy = "by-kind"
    after: After = After.STOP
    since_ns: int = 0
    reason: str = ""
    failure_id: str = ""
    restart_at_ns: int | None = None
    preflight_tries: int = 0
    ever_ready: bool = False

    @property
    def doomed(self) -> bool:
        """A FAILURE was declared and the tree goes: what else is late in it tells nobody anything."""
        observed = self.enforce == "observe"
        return self.state is State.FAILED or (self.state is State.STALLED and not observed)
