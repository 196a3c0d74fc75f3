"""Rules that rest on hard facts: an exit, a lost thread, state T, a lease, a stop, a start. Pure."""

from __future__ import annotations

from stallwatch.board.image import LaneClass
from stallwatch.diagnosis import deaths, describe
from stallwatch.diagnosis.call import Call, Facts
from stallwatch.diagnosis.kinds import Kind
from stallwatch.watch.finding import Rule
from stallwatch.watch.usage import usage

MAJOR_FAULTS = 20  # in the judged window: fewer are those of any program that wakes up
STOPPED_S = 0.5  # two looks in state T this far apart


def child_died(f: Facts) -> Call | None:
    if f.suspect.kind is not Kind.CHILD_DIED:
        return None
    ended = f.suspect.exit
    if ended is None:
        return Call(Kind.CHILD_DIED, "medium", ("its exit status is not known",))
    longest = describe.longest_busy(f.scene, besides=f.suspect.pid)
    if ended.signal in (None, 15) and longest:
        # An orderly end may be the engine's own answer to an older stall.
        return Call(Kind.CHILD_DIED, "medium", (f"when it ended, {longest}",))
    if doubt := deaths.doubt(f.scene, ended):
        return Call(Kind.CHILD_DIED, "medium", (doubt,))
    return Call(Kind.CHILD_DIED, "high", ())


def thread_died(f: Facts) -> Call | None:
    if f.suspect.kind is not Kind.THREAD_DIED:
        return None
    tid = f.suspect.lane.tid if f.suspect.lane is not None else f.scene.finding.subject.tid
    gone = tid > 0 and f.process.thread(tid).exists is False
    reason = f"thread {tid or '?'} is not among the threads of pid {f.suspect.pid}, which lives on"
    return Call(Kind.THREAD_DIED, "high" if gone else "medium", (reason,))


def process_stopped(f: Facts) -> Call | None:
    if f.process.state != "T" or f.process.tracer_pid:
        # The rule's two looks stand even if somebody continued it since.
        if f.suspect.kind is Kind.PROCESS_STOPPED:
            return Call(Kind.PROCESS_STOPPED, "medium", ("it was in state T at two looks",))
        return None
    ruled = f.scene.finding.rule is Rule.PROCESS_STOPPED
    sure = ruled or f.process.stopped_s >= STOPPED_S
    reason = f"pid {f.suspect.pid} is in state T and nobody traces it (TracerPid 0)"
    return Call(Kind.PROCESS_STOPPED, "high" if sure else "medium", (reason,))


def paused(f: Facts) -> Call | None:
    if f.scene.finding.rule is not Rule.PAUSE_EXPIRED:
        return None
    return Call(Kind.PAUSED_TOO_LONG, "high", ())


def shutdown(f: Facts) -> Call | None:
    if f.scene.finding.rule is not Rule.SHUTDOWN_HANG:
        return None
    return Call(Kind.SHUTDOWN_HANG, "high", ())


def never_ready(f: Facts) -> Call | None:
    if not f.scene.starting:
        return None
    lane = f.suspect.lane
    in_start = lane is not None and any(x.cls is LaneClass.START for x in lane.stack)
    ruled = f.scene.finding.rule is Rule.NEVER_READY
    if not (ruled or in_start):
        return None
    reasons = [] if ruled else ["the engine has not become ready"]
    if f.process.sleeping_owner is not None:
        reasons.append(f"{f.process.sleeping_owner.label} sleeps holding the GIL")
    if storage := _waits_for_storage(f):
        reasons.append(storage)
    return Call(Kind.NEVER_READY, "high" if in_start else "medium", tuple(reasons))


def _waits_for_storage(f: Facts) -> str:
    """A start that is slow because its pages come from storage, one by one; '' without a sign of it."""
    case = f.scene.case
    used = usage(case.before, case.after or case.snapshot, f.suspect.pid) if f.suspect.pid else None
    if used is None or used.major_faults < MAJOR_FAULTS:
        return ""
    return (
        f"pid {f.suspect.pid} waited for storage {used.major_faults} times in {used.window_s:.1f} s"
        " (major page faults): what it loads comes from a slow disk, or memory is short"
    )
