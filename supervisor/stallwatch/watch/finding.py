"""A finding: one rule says that one subject is late. Not yet a verdict."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Rule(StrEnum):
    """Which rule speaks."""

    PHASE_OVER_LIMIT = "phase-over-limit"
    NO_PROGRESS = "pending-work-without-progress"
    THREAD_GONE = "thread-gone"
    PROCESS_GONE = "process-gone"
    PROCESS_STOPPED = "process-stopped"
    NEVER_READY = "never-ready"
    PAUSE_EXPIRED = "pause-expired"
    SHUTDOWN_HANG = "shutdown-hang"
    DEGRADED = "degraded"
    REQUEST_SILENT = "request-silent"  # the gateway speaks: a client got no byte for too long


class Level(StrEnum):
    """WARN at 50 % of a limit (sample once, act never); OVER beyond it."""

    WARN = "warn"
    OVER = "over"


# Rules that speak of an engine as a whole: work is known to wait, and nothing comes of it.
NOTHING_DONE = frozenset({Rule.NO_PROGRESS, Rule.REQUEST_SILENT})


@dataclass(frozen=True, slots=True)
class Subject:
    """Whom the finding is about, as far as the rule knows; empty strings and 0 mean unknown."""

    process: str = ""  # "worker:0"
    role: str = ""
    rank: int = 0
    pid: int = 0
    start_ticks: int = 0
    tid: int = 0
    lane: str = ""  # "worker:0/model"
    phase: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """One late subject.

    `fingerprint` is everything that must not have moved between two looks for the finding to be
    confirmed (beats, work, entered, progress, state); `key` names the finding across looks.
    """

    rule: Rule
    level: Level
    subject: Subject
    since_ns: int  # when the judged stretch began (already shifted by extensions)
    elapsed_ns: int
    limit_ns: int
    key: str
    fingerprint: tuple[int | str, ...]
    notes: tuple[str, ...] = ()  # witnesses and facts, in words
