"""What must not move between two looks. One function per rule, used to find and to re-check."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from stallwatch.board.image import LaneImage, ProcessImage
from stallwatch.watch.finding import Finding, Rule
from stallwatch.watch.snapshot import ProcFacts, Silence, Slow, Snapshot

Fingerprint = tuple[int | str, ...]


def of_phase(lane: LaneImage, level: int) -> Fingerprint:
    """An outer level is held by its own clock only: fresh inner phases must not free it."""
    frame = lane.stack[level]
    own = (frame.name, int(frame.cls), frame.entered_ns, frame.progress_ns)
    return own if level < len(lane.stack) - 1 else (*own, lane.beats, lane.work)


def of_thread(lane: LaneImage) -> Fingerprint:
    return (lane.pid, lane.tid, lane.beats, lane.work)


def of_stopped(facts: ProcFacts, since_ns: int) -> Fingerprint:
    return (facts.pid, facts.start_ticks, facts.state, since_ns)


def of_no_progress(snapshot: Snapshot) -> Fingerprint:
    """The work counters themselves; pending may grow while nothing is done."""
    lanes = snapshot.image.lanes if snapshot.image else ()
    return (snapshot.recall.stuck_since_ns or 0, sum(lane.work for lane in lanes))


def of_pause(process: ProcessImage) -> Fingerprint:
    lease = process.pause
    return (process.pid, lease.entered_ns, lease.until_ns) if lease else (process.pid,)


def of_slow(slow: Slow, lane: LaneImage) -> Fingerprint:
    """It moves: only the end of the slow stretch withdraws it."""
    return (lane.pid, slow.since_ns)


def of_silence(silence: Silence) -> Fingerprint:
    """One byte to this client or to others, or another request that is the longest silent: it moved."""
    return (silence.request, silence.phase, silence.since_ns, silence.others_ns)


def of_start(snapshot: Snapshot, *, silence: bool) -> Fingerprint:
    """The total limit counts although things move; silence means that nothing does."""
    facts = snapshot.engine
    return (facts.started_ns, facts.side_progress_ns) if silence else (facts.started_ns,)


def current(finding: Finding, snapshot: Snapshot) -> Fingerprint | None:
    """The finding's fingerprint as this look would write it; None: its subject is gone or well.

    When the board could not be read, board rules cannot tell, and the old fingerprint stands.
    """
    return _CURRENT[finding.rule](finding, snapshot)


def _lane(finding: Finding, snapshot: Snapshot) -> LaneImage | None:
    subject = finding.subject
    for lane in snapshot.image.lanes if snapshot.image else ():
        same = lane.pid == subject.pid and lane.tid == subject.tid
        if same and lane.address == subject.lane and not lane.closed:
            return lane
    return None


def _phase(finding: Finding, snapshot: Snapshot) -> Fingerprint | None:
    if snapshot.image is None:
        return finding.fingerprint
    lane = _lane(finding, snapshot)
    level = int(finding.key.rpartition(":")[2])
    if lane is None or level >= len(lane.stack) or lane.pid not in snapshot.processes:
        return None
    return None if lane.address in snapshot.image.moving else of_phase(lane, level)


def _thread(finding: Finding, snapshot: Snapshot) -> Fingerprint | None:
    if snapshot.image is None:
        return finding.fingerprint
    lane = _lane(finding, snapshot)
    facts = snapshot.processes.get(finding.subject.pid)
    if lane is None or facts is None or (facts.tids is not None and lane.tid in facts.tids):
        return None
    return of_thread(lane)


def _stopped(finding: Finding, snapshot: Snapshot) -> Fingerprint | None:
    facts = snapshot.processes.get(finding.subject.pid)
    since = snapshot.recall.stopped_since_ns.get(finding.subject.pid)
    if facts is None or since is None or facts.state != "T":
        return None
    return of_stopped(facts, since)


def _no_progress(finding: Finding, snapshot: Snapshot) -> Fingerprint | None:
    if snapshot.image is None:
        return finding.fingerprint
    return None if snapshot.recall.stuck_since_ns is None else of_no_progress(snapshot)


def _never_ready(finding: Finding, snapshot: Snapshot) -> Fingerprint | None:
    if snapshot.engine.ready_ns is not None:
        return None
    return of_start(snapshot, silence=finding.key.endswith("silence"))


def _pause(finding: Finding, snapshot: Snapshot) -> Fingerprint | None:
    if snapshot.image is None:
        return finding.fingerprint
    mine = (p for p in snapshot.image.processes if p.pid == finding.subject.pid and p.pause)
    return next((of_pause(p) for p in mine), None)


def _gone(finding: Finding, _snapshot: Snapshot) -> Fingerprint | None:
    return finding.fingerprint  # an exit cannot un-happen


def _shutdown(_finding: Finding, snapshot: Snapshot) -> Fingerprint | None:
    if snapshot.engine.stop_asked_ns is None or not snapshot.processes:
        return None
    return (snapshot.engine.stop_asked_ns,)


def _degraded(finding: Finding, snapshot: Snapshot) -> Fingerprint | None:
    if snapshot.image is None:
        return finding.fingerprint
    lane = _lane(finding, snapshot)
    slow = snapshot.recall.slow.get(lane.slot) if lane is not None else None
    return of_slow(slow, lane) if lane is not None and slow is not None else None


def _silent(_finding: Finding, snapshot: Snapshot) -> Fingerprint | None:
    silence = snapshot.engine.silence
    return of_silence(silence) if silence is not None else None


_CURRENT: Mapping[Rule, Callable[[Finding, Snapshot], Fingerprint | None]] = {
    Rule.PHASE_OVER_LIMIT: _phase,
    Rule.NO_PROGRESS: _no_progress,
    Rule.THREAD_GONE: _thread,
    Rule.PROCESS_GONE: _gone,
    Rule.PROCESS_STOPPED: _stopped,
    Rule.NEVER_READY: _never_ready,
    Rule.PAUSE_EXPIRED: _pause,
    Rule.SHUTDOWN_HANG: _shutdown,
    Rule.DEGRADED: _degraded,
    Rule.REQUEST_SILENT: _silent,
}
