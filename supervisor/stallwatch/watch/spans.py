"""Stretches of the engine as a whole: a start, a pause, a stop that takes too long. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from stallwatch.board.image import BoardImage, LaneClass
from stallwatch.watch import fingerprint
from stallwatch.watch.finding import Finding, Level, Rule, Subject
from stallwatch.watch.grading import grade, lane_subject, starting
from stallwatch.watch.leases import lease_end
from stallwatch.watch.policy import Policy
from stallwatch.watch.snapshot import Snapshot


def never_ready(snapshot: Snapshot, now_ns: int, policy: Policy) -> Iterator[Finding]:
    """Start-up as a whole: a total limit, and a limit of silence in which nothing moves at all."""
    facts = snapshot.engine
    if not starting(facts):
        return
    clocks: Mapping[str, tuple[int, int]] = {
        "total": (facts.started_ns, policy.start_ns),
        "silence": (max(facts.started_ns, facts.side_progress_ns), policy.start_silence_ns),
    }
    for word, (since, limit) in clocks.items():
        elapsed = max(0, now_ns - since)
        level = grade(elapsed, limit, policy)
        if level is None:
            continue
        yield Finding(
            rule=Rule.NEVER_READY,
            level=level,
            subject=_laggard(snapshot),
            since_ns=since,
            elapsed_ns=elapsed,
            limit_ns=limit,
            key=f"{Rule.NEVER_READY}:{word}",
            fingerprint=fingerprint.of_start(snapshot, silence=word == "silence"),
            notes=(
                "no memory, read, write, child CPU or work moved"
                if word == "silence"
                else "the whole start took too long",
            ),
        )


def _laggard(snapshot: Snapshot) -> Subject:
    """Who holds the start up, as far as lanes tell: the oldest phase that waits for nobody."""
    image = snapshot.image
    unready = {p.pid for p in image.processes if not p.ready and not p.detached} if image else set()
    lanes = [
        lane
        for lane in (image.lanes if image else ())
        if lane.pid in unready and lane.pid in snapshot.processes and not lane.closed and lane.stack
    ]
    for classes in ((LaneClass.START, LaneClass.WORK), (LaneClass.WAIT,)):
        late = [lane for lane in lanes if lane.phase.cls in classes]
        if late:
            return lane_subject(
                min(late, key=lambda x: max(x.phase.entered_ns, x.phase.progress_ns))
            )
    root = snapshot.processes.get(snapshot.engine.root_pid)
    return Subject(pid=root.pid, start_ticks=root.start_ticks) if root else Subject()


def pause_expired(
    snapshot: Snapshot, image: BoardImage, now_ns: int, policy: Policy
) -> Iterator[Finding]:
    """A lease ran out and nobody ended the pause. There is no warning: a pause is no suspicion."""
    for process in image.processes:
        lease = process.pause
        if lease is None or process.detached or process.pid not in snapshot.processes:
            continue
        end = lease_end(lease, policy)
        if now_ns < end:
            continue
        yield Finding(
            rule=Rule.PAUSE_EXPIRED,
            level=Level.OVER,
            subject=Subject(
                process=process.address,
                role=process.role,
                rank=process.rank,
                pid=process.pid,
                start_ticks=process.start_ticks,
                phase=lease.name,
            ),
            since_ns=lease.entered_ns,
            elapsed_ns=max(0, now_ns - lease.entered_ns),
            limit_ns=max(0, end - lease.entered_ns),
            key=f"{Rule.PAUSE_EXPIRED}:{process.address}:{process.pid}",
            fingerprint=fingerprint.of_pause(process),
            notes=(f"pause {lease.name!r} of owner {lease.owner!r} is over its lease",),
        )


def shutdown_hang(snapshot: Snapshot, now_ns: int, policy: Policy) -> Iterator[Finding]:
    """Asked to stop, and members live after the grace."""
    asked = snapshot.engine.stop_asked_ns
    if asked is None or not snapshot.processes:
        return
    limit = max(1, snapshot.engine.stop_grace_ns)
    elapsed = max(0, now_ns - asked)
    level = grade(elapsed, limit, policy)
    if level is None:
        return
    root = snapshot.processes.get(snapshot.engine.root_pid)
    who = root or next(iter(snapshot.processes.values()))
    yield Finding(
        rule=Rule.SHUTDOWN_HANG,
        level=level,
        subject=Subject(pid=who.pid, start_ticks=who.start_ticks),
        since_ns=asked,
        elapsed_ns=elapsed,
        limit_ns=limit,
        key=str(Rule.SHUTDOWN_HANG),
        fingerprint=(asked,),
        notes=(f"{len(snapshot.processes)} members live",),
    )
