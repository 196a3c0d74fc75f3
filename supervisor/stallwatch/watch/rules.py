"""The rules: one snapshot in, findings out. Pure and total; nothing here reads a clock or a file.

Time that must not count (pauses, debuggers, idle stretches) arrives in `snapshot.recall`.
"""

from __future__ import annotations

from stallwatch.lifecycle.states import State
from stallwatch.watch.ends import process_gone, process_stopped, thread_gone
from stallwatch.watch.finding import Finding
from stallwatch.watch.phases import degraded, no_progress, phases
from stallwatch.watch.policy import Policy
from stallwatch.watch.requests import request_silent
from stallwatch.watch.snapshot import Snapshot
from stallwatch.watch.spans import never_ready, pause_expired, shutdown_hang

# States in which lanes and members are judged. Elsewhere the engine is being ended, or is not up.
JUDGED = frozenset({State.STARTING, State.READY, State.SUSPECT, State.STALLED, State.DRAINING})


def evaluate(snapshot: Snapshot, now_ns: int, policy: Policy) -> tuple[Finding, ...]:
    """Every late subject of one engine at `now_ns`, most certain rule first.

    Never raises. A later `now_ns` on the same snapshot never removes a finding.
    """
    found: list[Finding] = []
    found += shutdown_hang(snapshot, now_ns, policy)
    if snapshot.engine.state not in JUDGED:
        return tuple(found)
    found += process_gone(snapshot, now_ns)
    found += process_stopped(snapshot, now_ns, policy)
    if snapshot.image is not None:
        found += thread_gone(snapshot, snapshot.image, now_ns)
        found += pause_expired(snapshot, snapshot.image, now_ns, policy)
        found += phases(snapshot, snapshot.image, now_ns, policy)
        found += no_progress(snapshot, snapshot.image, now_ns, policy)
        found += degraded(snapshot, snapshot.image)
    found += request_silent(snapshot, now_ns, policy)
    found += never_ready(snapshot, now_ns, policy)
    return tuple(found)
