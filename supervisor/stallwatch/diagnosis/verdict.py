"""What diagnosis is given, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stallwatch.diagnosis.kinds import Kind
from stallwatch.evidence.model import ProcessEvidence
from stallwatch.watch.finding import Finding
from stallwatch.watch.objects import Objects
from stallwatch.watch.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Case:
    """Everything known of one confirmed finding. `later` are further samples, oldest first."""

    finding: Finding
    findings: tuple[Finding, ...]  # all findings of that look, confirmed or not
    before: Snapshot  # an earlier look (suspicion began): for CPU and I/O deltas
    snapshot: Snapshot  # the look that confirmed
    stacks: Mapping[int, ProcessEvidence] = field(default_factory=dict)  # by pid, first set
    later: tuple[Mapping[int, ProcessEvidence], ...] = ()
    after: Snapshot | None = None  # the latest look, when there is one
    log_tail: tuple[str, ...] = ()
    clock_ticks: int = 100  # SC_CLK_TCK
    gpu: Mapping[str, Any] = field(default_factory=dict)  # evidence.gpu.facts, once they are there
    objects: Objects = field(default_factory=Objects)  # what threads sleep on, as far as known


@dataclass(frozen=True, slots=True)
class Culprit:
    """Whom we accuse. Empty means: not known, and the report says so."""

    process: str = ""
    role: str = ""
    rank: int = 0
    pid: int = 0
    lane: str = ""
    phase: str = ""
    thread: str = ""
    frame: str = ""

    @property
    def address(self) -> str:
        return self.lane or self.process


@dataclass(frozen=True, slots=True)
class Edge:
    """`waiter` waits for `target`; both are lane addresses. why: the phase or channel."""

    waiter: str
    target: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    kind: Kind
    culprit: Culprit
    confidence: str  # "high", "medium", "low"
    summary: str  # one true sentence
    kinds: tuple[Kind, ...] = ()  # what else it could be, best first, `kind` included
    reasons: tuple[str, ...] = ()  # the evidence each claim rests on
    edges: tuple[Edge, ...] = ()
