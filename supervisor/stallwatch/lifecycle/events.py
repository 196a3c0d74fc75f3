"""What can happen to an engine, and what may be ordered in answer. Plain values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from stallwatch.diagnosis import kinds
from stallwatch.diagnosis.kinds import Kind


class EventKind(StrEnum):
    START_ASKED = "start-asked"
    SPAWNED = "spawned"
    SPAWN_FAILED = "spawn-failed"
    PREFLIGHT_FAILED = "preflight-failed"
    BECAME_READY = "became-ready"
    SERVED = "served"  # a request was served
    HEALTHY = "healthy"  # ten minutes without a finding
    SUSPECTED = "suspected"  # a finding was confirmed by a second look
    WITHDRAWN = "withdrawn"  # it moved at the third look
    DECLARED = "declared"  # diagnosis has a verdict
    EVIDENCE_DONE = "evidence-done"  # the rest was collected, or its time is over
    RECOVERED = "recovered"
    EXITED = "exited"  # the engine's root, or all of it, ended and nobody had asked
    TREE_GONE = "tree-gone"  # no member lives
    KILL_SURVIVED = "kill-survived"
    STOP_ASKED = "stop-asked"
    DRAIN_ASKED = "drain-asked"
    DRAINED = "drained"
    GRACE_OVER = "grace-over"
    BACKOFF_OVER = "backoff-over"
    RESTART_ASKED = "restart-asked"


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened. Only the fields that its kind needs are set."""

    kind: EventKind
    text: str = ""
    pid: int = 0  # SPAWNED
    retry: bool = False  # SPAWN_FAILED, PREFLIGHT_FAILED: trying again may help
    action: kinds.Action = kinds.Action.RESTART  # DECLARED: at most this
    stall: Kind = Kind.UNKNOWN_STALL  # DECLARED, EXITED
    failure_id: str = ""  # DECLARED, EXITED


class Do(StrEnum):
    """Orders to the engine's runner. It carries them out in order, one after the other."""

    PREFLIGHT_AND_SPAWN = "preflight-and-spawn"  # answers SPAWNED, SPAWN_FAILED, PREFLIGHT_FAILED
    COLLECT = "collect"  # first stacks; answers WITHDRAWN or DECLARED
    DECLARE = "declare"  # ledger, metrics, hooks; the board only when action is fail or restart
    FINISH_EVIDENCE = "finish-evidence"  # answers EVIDENCE_DONE, always, within 15 s
    KILL = "kill"  # answers TREE_GONE or KILL_SURVIVED; repeating it is harmless
    STOP = "stop"  # drain, SIGTERM, grace; answers TREE_GONE or GRACE_OVER
    DRAIN = "drain"  # answers DRAINED or GRACE_OVER
    ARM_BACKOFF = "arm-backoff"  # answers BACKOFF_OVER after delay_ns
    CLEAR = "clear"  # disarm the back-off, withdraw a declared failure
    SAVE_STATE = "save-state"
    ANNOUNCE = "announce"


@dataclass(frozen=True, slots=True)
class Action:
    """One order. Only the fields that its kind needs are set."""

    do: Do
    text: str = ""
    delay_ns: int = 0  # ARM_BACKOFF
    action: kinds.Action = kinds.Action.OBSERVE  # DECLARE: what is done about it
    stall: Kind = Kind.UNKNOWN_STALL  # DECLARE
    failure_id: str = ""  # DECLARE
