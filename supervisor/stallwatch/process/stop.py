"""The end that was asked for: drain, SIGTERM to the root only, grace, and then the kill."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from stallwatch.process.kill import KillLimits, KillResult, kill, trackers
from stallwatch.process.members import Membership

_STRAGGLERS_S = 5.0  # what is left once the root has ended gets no more than this


@dataclass(frozen=True, slots=True)
class StopResult:
    """graceful: everything ended by itself within the grace."""

    graceful: bool
    kill: KillResult
    took_s: float = 0.0

    @property
    def gone(self) -> bool:
        return self.kill.gone


def terminate(members: Membership, grace_s: float) -> bool:
    """SIGTERM to the root process, nobody else; True when all ended within the grace.

    Not to the group: vLLM's workers would drop the requests that its API server is still
    draining. Once the root is gone, nobody will stop the others: they get 5 s of the rest.
    """
    members.expect_exits()
    until = time.monotonic() + grace_s
    root = members.root_pid
    members.signal(root, signal.SIGTERM)
    root_gone = False
    while True:
        members.poll()
        living = members.members()
        if not living or living.keys() == trackers(living):
            return True
        if not root_gone and root not in living:
            root_gone = True
            until = min(until, time.monotonic() + _STRAGGLERS_S)
        left = until - time.monotonic()
        if left <= 0:
            return False
        members.wait_any(left)


def stop(
    members: Membership,
    *,
    grace_s: float,
    drain: Callable[[], object] | None = None,
    before_kill: Callable[[], object] | None = None,
    limits: KillLimits = KillLimits(),  # noqa: B008 - immutable
) -> StopResult:
    """Drain (bounded by the caller), SIGTERM, grace, kill.

    `before_kill` is called when the grace is over and something still lives: one stack of what
    hangs is worth having (SHUTDOWN_HANG). The kill follows whatever it does.
    """
    began = time.monotonic()
    if drain is not None:
        drain()
    graceful = terminate(members, grace_s)
    try:
        if not graceful and before_kill is not None:
            before_kill()
    finally:
        # Also after a graceful end: it sweeps re-parented members and shared memory.
        ended = kill(members, limits=limits)
    return StopResult(graceful=graceful, kill=ended, took_s=time.monotonic() - began)
