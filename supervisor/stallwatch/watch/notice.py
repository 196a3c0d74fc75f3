"""What the judge tells the daemon. Plain values; each is sent once per stretch."""

from __future__ import annotations

from dataclasses import dataclass

from stallwatch.watch.finding import Finding
from stallwatch.watch.policy import Policy
from stallwatch.watch.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Warned:
    """Half of a limit has passed: sample once, act never."""

    finding: Finding
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Confirmed:
    """Two looks agree. Take first stacks, look a third time, then declare.

    `before` is where suspicion began (CPU deltas); `findings` are all of this look, and `policy`
    holds the limits by which they were found: a pause or a reload may change them at any time.
    """

    finding: Finding
    findings: tuple[Finding, ...]
    before: Snapshot
    snapshot: Snapshot
    policy: Policy


@dataclass(frozen=True, slots=True)
class Extended:
    """A host witness bought the engine time: once per stretch, at most one more limit."""

    finding: Finding
    witness: str
    by_ns: int


@dataclass(frozen=True, slots=True)
class Debugged:
    """A foreign tracer suspends the limits. `expired`: its half hour is over, limits run again."""

    pid: int
    since_ns: int
    tracer_pid: int
    expired: bool = False


@dataclass(frozen=True, slots=True)
class JudgeFault:
    """Looking at this engine failed; the others go on. The text is for an operator."""

    engine: str
    text: str


Notice = Warned | Confirmed | Extended | Debugged | JudgeFault
