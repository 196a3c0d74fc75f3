"""The states of one engine, and which of them answer which probe."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """Wanted, up and ready are three separate facts; this is the fourth: what is being done."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    SUSPECT = "suspect"  # a finding is confirmed; first stacks are being taken
    STALLED = "stalled"  # FAILURE declared; clients are being answered
    FAILED = "failed"  # being killed, or killed and not to be restarted
    DRAINING = "draining"
    STOPPING = "stopping"
    BACKOFF = "backoff"
    EXHAUSTED = "exhausted"
    UNKILLABLE = "unkillable"


UNHEALTHY = frozenset({State.STALLED, State.FAILED, State.EXHAUSTED, State.UNKILLABLE})
SERVING = frozenset({State.READY, State.SUSPECT})


def health_word(state: State) -> str:
    """The word /healthz says for a state."""
    words = {
        State.STOPPED: "stopped",
        State.STARTING: "loading",
        State.READY: "ready",
        State.SUSPECT: "ready",
        State.DRAINING: "draining",
        State.STOPPING: "draining",
        State.BACKOFF: "restarting",
    }
    return words.get(state, str(state))
