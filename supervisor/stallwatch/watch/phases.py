"""Lanes that are late: each level of each lane by its own clock, and work that nobody does. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress, count, repeat
from operator import add, le

from stallwatch.board.columns import Lineup
from stallwatch.board.glance import Outline
from stallwatch.board.image import BoardImage, LaneClass, LaneImage, PhaseFrame
from stallwatch.board.seen import lane_at, survey
from stallwatch.watch import fingerprint
from stallwatch.watch.finding import Finding, Level, Rule, Subject
from stallwatch.watch.grading import (
    compile_ns,
    frame_limit,
    grade,
    lane_subject,
    scale,
    warm_up_ns,
)
from stallwatch.watch.leases import overlap, paused_slots
from stallwatch.watch.pace import decayed
from stallwatch.watch.policy import Policy
from stallwatch.watch.snapshot import Snapshot

NEVER_NS = 1 << 80


def phases(snapshot: Snapshot, image: BoardImage, now_ns: int, policy: Policy) -> Iterator[Finding]:
    """Each level of each lane against its own clock and its own limit."""
    excused_now = paused_slots(image, now_ns, policy)
    warm_up = warm_up_ns(snapshot, policy)
    moving = frozenset(image.moving)
    processes = snapshot.processes
    seen = survey(image)
    # The cheap test first: hundreds of lanes, ten times a second, nearly all of them fresh.
    dues = map(add, seen.oldest, _leasts(seen.lineup, policy, warm_up))
    for place in compress(count(), map(le, dues, repeat(now_ns))):
        lane = lane_at(image, place)
        owner = processes.get(lane.pid)
        if lane.slot in excused_now or owner is None or owner.start_ticks != lane.start_ticks:
            continue
        if moving and lane.address in moving:
            continue
        for level, frame in enumerate(lane.stack):
            limit = frame_limit(frame, policy, warm_up)
            if limit <= 0 or (now_ns - frame.entered_ns) < limit * policy.warn_fraction:
                continue
            limit = int(limit * scale(lane, frame))
            finding = _phase(snapshot, lane, level, now_ns, policy, limit)
            if finding is not None:
                yield finding


def _leasts(lineup: Lineup, policy: Policy, warm_up: int) -> Sequence[int]:
    """How old each lane's clocks must be before they can say anything; noted for the next look."""
    known, warm, leasts = lineup.leasts
    if known is not policy or warm != warm_up:
        leasts = [_least(outline, policy, warm_up) for outline in lineup.outlines]
        lineup.leasts = (policy, warm_up, leasts)
    return leasts


def _least(outline: Outline, policy: Policy, warm_up: int) -> int:
    if outline.idle or not outline.judged:
        return NEVER_NS
    limits = [frame_limit(level, policy, warm_up) for level in outline.levels]
    least = min((limit for limit in limits if limit > 0), default=0)
    return int(least * policy.warn_fraction) if least else NEVER_NS


def _phase(  # noqa: PLR0917 - the loop above has all of them at hand
    snapshot: Snapshot, lane: LaneImage, level: int, now_ns: int, policy: Policy, limit: int
) -> Finding | None:
    frame = lane.stack[level]
    if frame.cls is LaneClass.STOP and snapshot.engine.stop_asked_ns is not None:
        return None  # SHUTDOWN_HANG judges that
    intervals = snapshot.recall.excused.get(lane.slot, ())
    late = [
        (graded is Level.OVER, since, clock_limit, elapsed, note)
        for since, clock_limit, note in _clocks(snapshot, lane, frame, policy=policy, limit=limit)
        if (elapsed := max(0, now_ns - since - overlap(intervals, since))) >= 0
        and (graded := grade(elapsed, clock_limit, policy)) is not None
    ]
    if not late:
        return None
    over, since, limit, elapsed, note = max(late)
    notes = (note,) if note else ()
    if excused := overlap(intervals, since):
        notes = (*notes, f"{excused / 1e9:.1f} s of pause, debugger or idle time are not counted")
    return Finding(
        rule=Rule.PHASE_OVER_LIMIT,
        level=Level.OVER if over else Level.WARN,
        subject=lane_subject(lane, frame.name),
        since_ns=since,
        elapsed_ns=elapsed,
        limit_ns=limit,
        key=f"{Rule.PHASE_OVER_LIMIT}:{lane.address}:{lane.pid}:{lane.slot}:{level}",
        fingerprint=fingerprint.of_phase(lane, level),
        notes=notes,
    )


def _clocks(
    snapshot: Snapshot, lane: LaneImage, frame: PhaseFrame, *, policy: Policy, limit: int
) -> tuple[tuple[int, int, str], ...]:
    """(since, limit, note) of each clock of a level. START has two.

    What moves beside a start phase extends it, but not for ever: that is no progress of its own.
    """
    since = max(frame.entered_ns, frame.progress_ns)
    if frame.cls is not LaneClass.START:
        return _serving_clocks(snapshot, lane, frame, policy=policy, limit=limit)
    moved = snapshot.engine.pid_side_progress_ns.get(lane.pid, 0)
    total = max(limit, policy.start_ns)
    return (
        (max(since, moved), limit, "nothing beside the phase moved either"),
        (since, total, "whatever moves beside it, the phase itself reports nothing for too long"),
    )


def _serving_clocks(
    snapshot: Snapshot, lane: LaneImage, frame: PhaseFrame, *, policy: Policy, limit: int
) -> tuple[tuple[int, int, str], ...]:
    """A new shape may compile in the middle of serving: then compilers burn CPU for the process.

    Whoever waits is helped by the compilers of anybody, and ranks of one role take steps together:
    the slowest holds up the others. It is no progress of its own, and bounded.
    """
    since = max(frame.entered_ns, frame.progress_ns)
    compiled = snapshot.recall.compiled_ns
    if not compiled:
        return ((since, limit, ""),)
    latest = max(compiled.values()) if frame.cls is LaneClass.WAIT else _peers(snapshot, lane)
    if latest <= since:
        return ((since, limit, ""),)
    return (
        (latest, limit, "compilers worked for it meanwhile, and no longer do"),
        (since, compile_ns(policy, limit), "compilers work for it, for too long"),
    )


def _peers(snapshot: Snapshot, lane: LaneImage) -> int:
    """When compilers of this process, or of another of its role, were last seen at work."""
    roles = {p.pid: p.role for p in snapshot.image.processes} if snapshot.image else {}
    mine = (lane.pid, lane.role)
    seen = snapshot.recall.compiled_ns.items()
    return max((at for pid, at in seen if pid == mine[0] or roles.get(pid) == mine[1]), default=0)


def no_progress(
    snapshot: Snapshot, image: BoardImage, now_ns: int, policy: Policy
) -> Iterator[Finding]:
    """Work is known to be waiting, and no counter of finished work moves, ticking or not."""
    since = snapshot.recall.stuck_since_ns
    waiting = [p for p in image.processes if p.pending > 0 and not p.detached]
    if since is None or not waiting or policy.no_progress_ns <= 0:
        return
    since = max(since, _compiled(snapshot, since, now_ns, policy))
    elapsed = max(0, now_ns - since)
    if grade(elapsed, policy.no_progress_ns, policy) is None:
        return
    # A phase whose own limit is longer is judged by that limit, not undercut here.
    warm_up = warm_up_ns(snapshot, policy)
    limit = max(policy.no_progress_ns, warm_up, longest_working(image, policy))
    level = grade(elapsed, limit, policy)
    if level is None:
        return
    pending = ", ".join(f"{p.address} has {p.pending}" for p in waiting[:8])
    yield Finding(
        rule=Rule.NO_PROGRESS,
        level=level,
        subject=Subject(),  # the loudest waiter is never the culprit: diagnosis finds the root
        since_ns=since,
        elapsed_ns=elapsed,
        limit_ns=limit,
        key=str(Rule.NO_PROGRESS),
        fingerprint=fingerprint.of_no_progress(snapshot),
        notes=(f"pending: {pending}",),
    )


def _compiled(snapshot: Snapshot, since_ns: int, now_ns: int, policy: Policy) -> int:
    """When compilers were last seen at work, as long as they may excuse the engine; else 0."""
    latest = max(snapshot.recall.compiled_ns.values(), default=0)
    allowed = now_ns - since_ns < compile_ns(policy, policy.no_progress_ns)
    return latest if allowed else 0


def degraded(snapshot: Snapshot, image: BoardImage) -> Iterator[Finding]:
    """Lanes that work at a tenth of their usual rate or less, window after window, work pending."""
    slow = {slot: s for slot, s in snapshot.recall.slow.items() if decayed(s)}
    if not slow:
        return
    lanes = [x for x in image.lanes if x.slot in slow and not x.closed and x.stack]
    if not lanes:
        return
    lane = min(lanes, key=lambda x: slow[x.slot].work / max(1, slow[x.slot].usual))
    seen = slow[lane.slot]
    yield Finding(
        rule=Rule.DEGRADED,
        level=Level.OVER,
        subject=lane_subject(lane),
        since_ns=seen.since_ns,
        elapsed_ns=max(0, snapshot.now_ns - seen.since_ns),
        limit_ns=0,
        key=f"{Rule.DEGRADED}:{lane.address}:{lane.pid}",
        fingerprint=fingerprint.of_slow(seen, lane),
        notes=(f"{lane.address} did {seen.work} where it usually does {seen.usual}",),
    )


def longest_working(image: BoardImage, policy: Policy) -> int:
    """The longest limit that somebody wrote down for a current work or wait phase.

    That phase's own rule guards it. Default limits do not count: whoever configures a short
    no_progress means it.
    """
    longest = 0
    for lane in image.lanes:
        frame = lane.phase
        if lane.closed or frame.cls not in (LaneClass.WORK, LaneClass.WAIT):
            continue
        if frame.limit_ns > longest or policy.phases.get(frame.name, 0) > longest:
            longest = policy.limit(frame)
    return longest
