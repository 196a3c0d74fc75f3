"""Rules about one thread that sleeps on the host: pipes, lock files, forks, loaders, an event loop. Pure."""

from __future__ import annotations

from stallwatch.board.image import LaneClass, LaneImage
from stallwatch.diagnosis import describe, gang, graph
from stallwatch.diagnosis import frames as fr
from stallwatch.diagnosis.call import Call, Facts
from stallwatch.diagnosis.kinds import Kind
from stallwatch.diagnosis.signals import Process, Thread
from stallwatch.diagnosis.suspect import Suspect
from stallwatch.diagnosis.vocabulary import prefixed
from stallwatch.evidence.model import Frame
from stallwatch.watch.finding import Level
from stallwatch.watch.snapshot import ProcFacts

POLL_SHARE = 0.15  # of a core: a poll wakes up now and then


def output_blocked(f: Facts) -> Call | None:
    """K21: the kernel itself says that the thread sleeps in a write to a full pipe.

    A lane that hands results over and stays in it while work is pending is the same thing seen
    from the board: then the reader is not proved, and neither is the pipe.
    """
    if f.thread.asleep and f.thread.wchan.startswith(f.words.full_socket_wchans):
        reason = f"{f.thread.label} sleeps in {f.thread.wchan}: the socket is full and nobody reads"
        return Call(Kind.OUTPUT_BLOCKED, "high", (reason,))
    if f.thread.asleep and f.thread.wchan.startswith(f.words.full_pipe_wchans):
        reason = (
            f"{f.thread.label} sleeps in {f.thread.wchan}: the pipe is full and nobody reads it"
        )
        return Call(Kind.OUTPUT_BLOCKED, "high", (reason, *_reader(f)))
    lane = f.suspect.lane
    if lane is None or lane.phase.cls is not LaneClass.WORK or not f.thread.asleep:
        return None
    if lane.phase.name.lower() not in f.words.send_phases:
        return None
    if any(x.address != lane.address and f.scene.stuck(x) for x in f.scene.others(lane)):
        return None
    reason = (
        f"{lane.address} hands results over and sleeps in it, while every other lane idles or moves"
    )
    return Call(Kind.OUTPUT_BLOCKED, "medium", (reason,))


def _reader(f: Facts) -> tuple[str, ...]:
    """Who holds the other end of the pipe, if the case says so."""
    pipes = f.scene.case.objects.pipes.get((f.suspect.pid, f.thread.tid), ())
    if not pipes:
        return ()
    return (f"the reading end is held by {', '.join(f.scene.name_of(pid) for pid in pipes[:4])}",)


def frontend(f: Facts) -> Call | None:
    """K16: the event loop's own lane is late while every other process is idle, moves, or waits for it."""
    lane = f.suspect.lane
    if lane is None or lane.role.lower() not in f.words.frontend_roles:
        return None
    if lane.name.lower() not in f.words.frontend_lanes:
        return None
    # Its own limit may be longer than that of a wait for it; then it must be seen to stand.
    led = f.suspect.path not in ((), (lane.address,))
    if led and (f.suspect.path[-1] != lane.address or f.scene.moved(lane)):
        return None
    rest = [x for x in f.scene.lanes.values() if x.address != lane.address]
    others = [x for x in rest if x.pid != lane.pid]
    if not f.scene.alive(lane) or any(_ails(f, x, lane) for x in others or rest):
        return None
    if not others:
        reason = f"the event loop has not turned for {f.scene.age_s(lane):.1f} s"
        more = "no other process has a lane: what is behind it cannot be seen"
        return Call(Kind.FRONTEND_BLOCKED, "medium", (reason, more))
    reason = (
        f"the event loop has not turned for {f.scene.age_s(lane):.1f} s"
        f" while the {describe.count(len(others), 'lane')} of other processes idle, move or wait for it"
    )
    return Call(
        Kind.FRONTEND_BLOCKED, "medium" if led or not f.thread.samples else "high", (reason,)
    )


def _ails(f: Facts, other: LaneImage, loop: LaneImage) -> bool:
    """It stands still for a reason of its own, so the loop may be a victim.

    Whoever waits for the front end, or moved after the loop had stopped and is not late, is none.
    """
    if not f.scene.stuck(other):
        return False
    if other.phase.cls is LaneClass.WAIT and _ends_at(f, other, loop):
        return False
    late = f.scene.late(other.address)
    if late is not None and late.level is Level.OVER:
        return True
    return f.scene.since_ns(other) <= f.scene.since_ns(loop)


def _ends_at(f: Facts, waiter: LaneImage, loop: LaneImage) -> bool:
    chain = graph.root(waiter.address, f.scene.edges)
    lane = f.scene.lanes.get(chain.root)
    return not chain.cycle and (
        (lane is not None and lane.pid == loop.pid) or chain.root == loop.address.partition("/")[0]
    )


def stale_lock(f: Facts) -> Call | None:
    """K13: it polls for a lock file to go away; the file is there, and nobody alive holds it.

    The name of a function is a hint, the file is the proof: without a file that exists there is no
    verdict, since this kind is not restarted.
    """
    frame = _polls_lock(f)
    if frame is None:
        return None
    for lock in f.scene.case.objects.locks:
        if lock.holder:
            continue
        reason = (
            f"{f.thread.label} polls in {frame.name} while the lock file {lock.path} exists,"
            f" {lock.age_s:.0f} s old, and no living process holds it"
        )
        return Call(Kind.STALE_LOCK_FILE, "high" if lock.named else "medium", (reason,))
    return None


def _polls_lock(f: Facts) -> Frame | None:
    """The frame that says "lock", of a thread that sleeps and wakes and uses no CPU."""
    thread, cpu = f.thread, f.thread.cpu or f.process.cpu
    if not thread.samples or (cpu is None and not thread.asleep):
        return None
    if cpu is not None and cpu.share > POLL_SHARE:
        return None
    timed = thread.wchan.startswith(f.words.timed_wchans) or thread.waits_for(f.words) in (
        "time.sleep",
        "a lock file",
    )
    if not timed:
        return None
    frames = fr.python_frames(thread.samples[0].frames)[:4]
    return next((x for x in frames if fr.says_lock(x, f.words)), None)


def forked(f: Facts) -> Call | None:
    """K12: a child made by fork sleeps in a lock that nobody in it can release.

    It has one thread, it never came to a mark of its own, and its stack is its parent's.
    """
    for facts in f.scene.look.processes.values():
        parent = f.scene.look.processes.get(facts.ppid)
        if parent is None or not _concerns(f, facts):
            continue
        child = f.scene.signals(facts.pid, facts.start_ticks)
        thread = child.thread(facts.pid)
        if facts.threads > 1 or not thread.asleep or not thread.samples or not _in_lock(f, thread):
            continue
        made = _fork_frame(f, thread, f.scene.signals(parent.pid, parent.start_ticks))
        if not made or facts.pid not in f.scene.case.objects.twins:
            continue
        cpu = thread.cpu or child.cpu
        if cpu is not None and not cpu.idle:
            continue
        who = f.scene.name_of(parent.pid)
        reason = f"pid {facts.pid} was forked from {who} ({made}) and sleeps in a lock, alone in its process"
        accused = Suspect(
            pid=facts.pid,
            start_ticks=facts.start_ticks,
            process=f"pid:{facts.pid}",
            path=f.suspect.path,
            reasons=f.suspect.reasons,
        )
        return Call(Kind.FORK_OR_FD_INHERITANCE, "high", (reason,), thread, instead=accused)
    return inherited(f)


def _concerns(f: Facts, facts: ProcFacts) -> bool:
    """A process that never attached: a child of the accused, or the accused itself."""
    if f.scene.member(facts.pid, facts.start_ticks) is not None:
        return False
    return f.suspect.pid in (facts.pid, facts.ppid)


def _in_lock(f: Facts, thread: Thread) -> bool:
    if thread.wchan:
        return thread.wchan.startswith(f.words.lock_wchans)
    return thread.waits_for(f.words) in ("", "a lock", "a threading lock or condition")


def _fork_frame(f: Facts, thread: Thread, parent: Process) -> str:
    """How it shows that it was forked and never became another program, or ''.

    The same program started anew has the same outermost frames, but a command line of its own.
    """
    frames = fr.python_frames(thread.samples[0].frames)
    for frame in frames:
        if fr.is_fork(frame, f.words):
            return f"through {frame.name}"
    outer = tuple((x.name, x.filename) for x in reversed(frames))
    for other in parent.threads.values():
        if not other.samples:
            continue
        theirs = tuple(
            (x.name, x.filename) for x in reversed(fr.python_frames(other.samples[0].frames))
        )
        if len(theirs) > 1 and outer[: len(theirs)] == theirs:
            return f"its stack goes on where {other.label or 'a thread'} of its parent waits"
    return ""


def inherited(f: Facts) -> Call | None:
    """K12, the other form: a reader waits for an end of file while a descendant holds the pipe open."""
    holders = f.scene.case.objects.writers.get((f.suspect.pid, f.thread.tid), ())
    if not f.thread.asleep or not f.thread.wchan.startswith(f.words.empty_pipe_wchans):
        return None
    strangers = [p for p in holders if p != f.suspect.pid and not f.scene.is_attached(p)]
    if not strangers or len(strangers) != len([p for p in holders if p != f.suspect.pid]):
        return None
    facts = f.scene.look.processes.get(strangers[0])
    if facts is None:
        return None
    names = ", ".join(f.scene.name_of(p) for p in strangers[:4])
    reason = (
        f"{f.thread.label} waits for a pipe's end of file, and only {names} still holds it open"
    )
    accused = Suspect(
        pid=facts.pid,
        start_ticks=facts.start_ticks,
        process=f"pid:{facts.pid}",
        path=f.suspect.path,
        reasons=f.suspect.reasons,
    )
    return Call(Kind.FORK_OR_FD_INHERITANCE, "medium", (reason,), instead=accused)


def lazy_load(f: Facts) -> Call | None:
    """K14: it loads a kernel for the first time while its peers stand in a collective."""
    lane = f.suspect.lane
    if lane is None or not f.thread.samples or not f.thread.asleep:
        return None
    frame = next(
        (x for s in f.thread.samples for x in s.frames[:8] if fr.loads_kernel(x, f.words)), None
    )
    if frame is None:
        return None
    peers = [x for x in f.scene.gang(lane) if x.address != lane.address]
    inside = [x for x in peers if f.scene.in_collective(x)]
    loading = [x for x in peers if f.scene.shows(x, lambda y: fr.loads_kernel(y, f.words))]
    reason = f"{f.thread.label} loads a kernel ({frame.name})"
    if peers and len(inside) + len(loading) == len(peers):
        what = f"{describe.count(len(inside), 'peer')} in a collective" if inside else ""
        also = f"{describe.count(len(loading), 'peer')} in the same load" if loading else ""
        words = " and ".join(x for x in (what, also) if x)
        edges = gang.edges_to(lane, inside)
        return Call(Kind.LAZY_LOAD_LOCK, "high", (f"{reason} while {words}",), edges=edges)
    if prefixed(f.thread.wchan, f.words.host_wchans):
        return None
    return Call(
        Kind.LAZY_LOAD_LOCK,
        "medium",
        (f"{reason} and sleeps in it", "whether a collective runs meanwhile is not known"),
        others=(Kind.DEVICE_WAIT,),
    )
