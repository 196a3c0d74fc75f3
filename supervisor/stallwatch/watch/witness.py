"""Host witnesses: the only grounds on which a limit is extended. Pure.

"All lanes stopped together" is no witness: that is also what a dead device looks like.
"""

from __future__ import annotations

from stallwatch.watch.snapshot import HostFacts, Snapshot

SHARE = 0.2  # of the window: cpu.stat throttled_usec, PSI cpu full


def witness(
    before: Snapshot, now: Snapshot, *, late_ns: int, limit_ns: int
) -> tuple[str, int] | None:
    """(what was seen, how much time it buys in ns), or None. Never more than one limit.

    `late_ns` is how late our own looks were in this stretch, summed over looks late by more than a
    period: whoever did not look for a minute cannot accuse anybody of that minute. Lateness buys
    what it took; a throttled or frozen host buys a whole limit, since its share is an estimate.
    """
    window = now.now_ns - before.now_ns
    old, new = before.host, now.host
    if new.frozen:
        return "the engine's cgroup is frozen", limit_ns
    if share := _share(old.throttled_usec, new.throttled_usec, window):
        return f"CPU quota throttled {share:.0%} of {window / 1e9:.1f} s", limit_ns
    if share := _share(old.cpu_full_usec, new.cpu_full_usec, window):
        return f"CPU pressure (full) {share:.0%} of {window / 1e9:.1f} s", limit_ns
    if late_ns > 0:
        return f"our own looks came {late_ns / 1e9:.2f} s late", min(late_ns, limit_ns)
    return None


def lateness(host: HostFacts, period_ns: int) -> int:
    """How late this look was, if late by more than a period; else 0."""
    return host.late_ns if host.late_ns > period_ns else 0


def _share(old_usec: int | None, new_usec: int | None, window_ns: int) -> float:
    if old_usec is None or new_usec is None or window_ns <= 0:
        return 0.0
    share = (new_usec - old_usec) * 1000 / window_ns
    return share if share > SHARE else 0.0
