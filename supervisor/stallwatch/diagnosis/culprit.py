"""Who is accused. Hard facts first (exit, lost thread, stopped process), then the wait-for graph.

The loudest waiter is never the culprit: whoever it waits for is, and where it waits for several
ranks that work in step, the one that differs from the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stallwatch.board.image import LaneClass, LaneImage, ProcessImage
from stallwatch.diagnosis import deaths, gang, graph
from stallwatch.diagnosis.kinds import Kind
from stallwatch.diagnosis.scene import Scene
from stallwatch.diagnosis.suspect import Suspect
from stallwatch.watch.finding import NOTHING_DONE, Finding, Rule


def select(scene: Scene) -> Suspect:
    """Never raises; an empty Suspect means that nobody can be named."""
    rule = scene.finding.rule
    suspect = _dead(scene) or _lost_thread(scene) or _stopped(scene)
    if suspect is not None:
        return suspect
    if rule is Rule.PAUSE_EXPIRED:
        return _from_finding(scene, scene.finding)
    if rule is Rule.NEVER_READY:
        return _never_ready(scene)
    if rule in NOTHING_DONE:
        return _no_progress(scene)
    subject = scene.finding.subject
    member = scene.member(subject.pid, subject.start_ticks) if subject.pid else None
    process = subject.process or (member.address if member is not None else "")
    start = subject.lane or _busiest(scene, process) or _oldest_stuck(scene)
    return _chase(scene, start) if start else _from_finding(scene, scene.finding)


def _dead(scene: Scene) -> Suspect | None:
    """The first process that ended."""
    death = deaths.first(scene)
    if death is not None:
        suspect = _of_dead(scene, death.pid, death.start_ticks)
        return replace(suspect, kind=Kind.CHILD_DIED, exit=death.exit).because(death.reason)
    finding = scene.found(Rule.PROCESS_GONE)
    if finding is None:
        return None
    return replace(_from_finding(scene, finding), kind=Kind.CHILD_DIED)


def _of_dead(scene: Scene, pid: int, ticks: int) -> Suspect:
    image = scene.look.image
    lanes = [
        lane
        for lane in (image.lanes if image else ())
        if (lane.pid, lane.start_ticks) == (pid, ticks) and lane.stack
    ]
    # The last phase: what it was busy with, else where it last was.
    lane = max(
        lanes,
        key=lambda x: (x.phase.cls is not LaneClass.IDLE, x.phase.entered_ns),
        default=None,
    )
    return _named(pid, ticks, lane=lane, process=scene.member(pid, ticks))


def _lost_thread(scene: Scene) -> Suspect | None:
    finding = scene.found(Rule.THREAD_GONE)
    if finding is None:
        return None
    suspect = _from_finding(scene, finding)
    # A thread is gone with its process, too: then the process is what ended.
    alive = graph.is_alive(scene.look, suspect.pid, suspect.start_ticks)
    return replace(suspect, kind=Kind.THREAD_DIED) if alive else None


def _stopped(scene: Scene) -> Suspect | None:
    """State T explains every wait; an attached process in it needs no graph."""
    finding = scene.found(Rule.PROCESS_STOPPED)
    if finding is not None:
        return replace(_from_finding(scene, finding), kind=Kind.PROCESS_STOPPED)
    for process in scene.processes.values():
        if (
            not process.detached
            and graph.is_stopped(scene.look, process.pid)
            and scene.alive(process)
        ):
            return _of_process(scene, process, Kind.PROCESS_STOPPED)
    return None


def _never_ready(scene: Scene) -> Suspect:
    """The start phase that everybody else waits for."""
    subject = scene.finding.subject
    start = subject.lane or _busiest(scene, subject.process)
    if not start:
        starting = [x for x in scene.lanes.values() if _in_start(x) and scene.stuck(x)]
        start = min(starting, key=scene.since_ns).address if starting else ""
    return _chase(scene, start) if start else _from_finding(scene, scene.finding)


def _in_start(lane: LaneImage) -> bool:
    return any(frame.cls is LaneClass.START for frame in lane.stack)


def _no_progress(scene: Scene) -> Suspect:
    """Pending work, nothing finished: a lane that hands results over and stays in it, else the graph."""
    words = scene.words
    held = [x for x in scene.lanes.values() if scene.stuck(x)]
    for names, what in ((words.copy_phases, "copies"), (words.send_phases, "sends")):
        lane = _oldest(scene, [x for x in held if x.phase.name.lower() in names])
        if lane is not None:
            return _of_lane(scene, lane, path=(lane.address,)).because(
                f"it is the lane that {what} results, and it has not moved for {scene.age_s(lane):.1f} s "
                "while work is pending"
            )
    start = scene.finding.subject.lane
    if not start or start not in scene.lanes or not scene.stuck(scene.lanes[start]):
        oldest = _oldest(scene, held)
        start = oldest.address if oldest is not None else ""
    if start:
        return _chase(scene, start)
    return _all_rest(scene)


def _all_rest(scene: Scene) -> Suspect:
    """No lane is stuck: one turns and does nothing, or a message was lost, or a peer owes it."""
    lanes = list(scene.lanes.values())
    owed = next((x for x in lanes if graph.is_remote(x.wait_on, scene.words)), None)
    if owed is not None:
        return _abroad((owed.address, owed.wait_on))
    turning = [x for x in lanes if scene.turns(x)]
    if not turning:
        why = "every lane is in its idle place although work is pending"
        return replace(_from_finding(scene, scene.finding), hints=(Kind.LOST_WAKEUP,)).because(why)
    why = f"of the lanes, {len(turning)} still turn, but nothing pending gets done"
    lane = max(turning, key=lambda x: _schedules(scene, x))
    return replace(_of_lane(scene, lane), hints=(Kind.NO_FORWARD_PROGRESS,)).because(why)


def _schedules(scene: Scene, lane: LaneImage) -> tuple[bool, bool, int]:
    """How much a turning lane looks like the scheduler: seen at work, its role, how often it turns."""
    named = lane.name.lower() in scene.words.scheduler_lanes
    named = named or lane.role.lower() in scene.words.scheduler_roles
    return (scene.seen_working(lane), named, scene.beats_between(lane))


def _abroad(path: tuple[str, ...]) -> Suspect:
    """The last address of the path is no lane of this engine: a machine elsewhere."""
    remote = path[-1]
    return Suspect(process=remote, phase="", path=path, remote=remote).because(
        f"{path[-2] if len(path) > 1 else 'somebody'} waits for {remote}, outside this engine"
    )


def _oldest_stuck(scene: Scene) -> str:
    lane = _oldest(scene, [x for x in scene.lanes.values() if scene.stuck(x)])
    return lane.address if lane is not None else ""


def _oldest(scene: Scene, lanes: Sequence[LaneImage]) -> LaneImage | None:
    return min(lanes, key=scene.since_ns, default=None)


def _busiest(scene: Scene, process: str) -> str:
    lane = graph.busiest_lane(scene.lanes, process) if process else None
    return lane.address if lane is not None else ""


def _chase(scene: Scene, start: str) -> Suspect:
    """Follow the waits to their end, then look around there."""
    chain = graph.root(start, scene.edges, lambda options: gang.pick(scene, options))
    hard = _hard_fact(scene, chain.path)
    if hard is not None:
        return replace(hard, path=chain.path)
    if chain.cycle:
        return _circle(scene, chain)
    lane = scene.lanes.get(chain.root)
    if lane is None or not scene.alive(lane):
        return _missing(scene, chain, lane)
    return _settle(scene, chain, lane)


def _hard_fact(scene: Scene, path: Sequence[str]) -> Suspect | None:
    """Stopped, lost its thread, or sits on the GIL: true wherever it is on the way, root first."""
    seen: dict[str, LaneImage] = {}
    for address in reversed(path):
        lane = scene.lanes.get(address)
        if lane is not None:
            seen |= {x.address: x for x in (lane, *scene.gang(lane))}
    for lane in seen.values():
        if not scene.alive(lane):
            continue
        if graph.is_stopped(scene.look, lane.pid):
            return replace(_of_lane(scene, lane), kind=Kind.PROCESS_STOPPED)
        if not lane.channel and scene.thread(lane).exists is False:
            return replace(_of_lane(scene, lane), kind=Kind.THREAD_DIED)
    for lane in seen.values():
        if scene.alive(lane) and scene.silent(lane.pid) and scene.of(lane).sleeping_owner:
            return _of_lane(scene, lane)
    return None


def _circle(scene: Scene, chain: graph.Chain) -> Suspect:
    writer = next((x for a in chain.cycle if (x := scene.lanes.get(a)) and _writes(scene, x)), None)
    if writer is not None:
        return replace(_of_lane(scene, writer), path=chain.path).because(
            f"{writer.address} sleeps in a write, not in the wait that it declared"
        )
    around = [e for e in chain.edges if e.waiter in chain.cycle]
    rest = next((e for e in around if e.why == graph.IDLE and e.waiter in scene.lanes), None)
    if rest is not None:
        return _resting(scene, chain, rest.waiter)
    lane = scene.lanes.get(chain.cycle[0])
    named = _of_lane(scene, lane) if lane is not None else Suspect(process=chain.cycle[0])
    ring = " -> ".join((*chain.cycle, chain.cycle[0]))
    declared = all(
        "/" in e.waiter and not scene.moved(scene.lanes[e.waiter])
        for e in around
        if e.waiter in scene.lanes
    ) and all(e.waiter in scene.lanes for e in around)
    return replace(
        named,
        kind=Kind.ORDER_CYCLE if declared else None,
        path=chain.path,
        cycle=chain.cycle,
        hints=(Kind.ORDER_CYCLE,),
    ).because(f"they wait for each other: {ring}")


def _resting(scene: Scene, chain: graph.Chain, address: str) -> Suspect:
    """An idle lane closes the circle: it is an end, since nobody sent it the work that it waits for."""
    suspect = _of_lane(scene, scene.lanes[address], path=chain.path)
    waiter = chain.cycle[chain.cycle.index(address) - 1]
    return replace(suspect, hints=(Kind.LOST_WAKEUP,)).because(
        f"{waiter} waits for it, and it is idle"
    )


def _writes(scene: Scene, lane: LaneImage) -> bool:
    """The kernel says that its thread sleeps in a full pipe or socket: no lane of ours can end that."""
    if lane.channel:
        return False
    thread = scene.thread(lane)
    full = (*scene.words.full_pipe_wchans, *scene.words.full_socket_wchans)
    return thread.asleep and thread.wchan.startswith(full)


def _missing(scene: Scene, chain: graph.Chain, lane: LaneImage | None) -> Suspect:
    """The end of the chain is not there: a dead process, or a lane nobody has."""
    process = scene.process_at(chain.root)
    identity = lane or process
    waiter = chain.path[-2] if len(chain.path) > 1 else ""
    if graph.is_remote(chain.root, scene.words):
        return _abroad(chain.path)
    if (
        identity is not None
        and not scene.alive(identity)
        and not getattr(process, "detached", False)
    ):
        ended = next(
            (
                e
                for e in scene.case.snapshot.exits
                if (e.pid, e.start_ticks) == (identity.pid, identity.start_ticks)
            ),
            None,
        )
        elder = deaths.forebear(scene, identity.pid, identity.start_ticks) if not ended else None
        if elder is not None:
            return replace(_of_dead(scene, *elder), kind=Kind.CHILD_DIED, path=chain.path).because(
                f"{chain.root.partition('/')[0]}, its child, followed it"
            )
        if ended is None or not ended.expected:
            words = ended.words() if ended else "it is no longer among the living members"
            return replace(
                _named(identity.pid, identity.start_ticks, lane=lane, process=process),
                kind=Kind.CHILD_DIED,
                exit=ended,
                path=chain.path,
            ).because(words, f"{waiter} still waits for it" if waiter else "")
    if process is not None:
        return replace(_of_process(scene, process, None), path=chain.path).because(
            "every lane of it is idle"
            if "/" not in chain.root
            else f"it has no open lane {chain.root}"
        )
    name = chain.root.partition("/")[0]
    return Suspect(process=name, path=chain.path).because(
        f"{waiter or 'somebody'} waits for {chain.root}, which never attached"
    )


def _settle(scene: Scene, chain: graph.Chain, lane: LaneImage) -> Suspect:
    """The root is there. Idle: look at its process's other lanes. In a gang: find the odd one."""
    words = scene.words
    odd = gang.odd_one(scene, lane)
    if lane.phase.cls is LaneClass.IDLE:
        held = [x for x in scene.mates(lane) if scene.stuck(x)]
        for names in (words.copy_phases, words.send_phases, None):
            named = [x for x in held if names is None or x.phase.name.lower() in names]
            named = [x for x in named if x.address not in chain.path]
            other = _oldest(scene, named)
            if other is not None:
                return _of_lane(scene, other, path=(*chain.path, other.address)).because(
                    f"{lane.address} is idle, but {other.address} of the same process has been in "
                    f"{other.phase.name} for {scene.age_s(other):.1f} s"
                )
    if odd is not None and odd.lane is not None:
        path = chain.path if odd.lane.address == lane.address else (*chain.path, odd.lane.address)
        named_odd = replace(_of_lane(scene, odd.lane, path=path), hints=odd.hints, odd=True)
        return named_odd.because(odd.reason)
    suspect = _of_lane(scene, lane, path=chain.path)
    if odd is not None:
        suspect = replace(suspect, hints=odd.hints).because(odd.reason)
    if lane.phase.cls is LaneClass.IDLE and len(chain.path) > 1:
        suspect = replace(suspect, hints=(*suspect.hints, Kind.LOST_WAKEUP)).because(
            f"{chain.path[-2]} waits for it, and it is idle"
        )
    return suspect


def _from_finding(scene: Scene, finding: Finding) -> Suspect:
    subject = finding.subject
    lane = scene.lanes.get(subject.lane)
    if lane is not None and subject.pid in (0, lane.pid):
        return replace(_of_lane(scene, lane), phase=subject.phase or lane.phase.name)
    process = scene.processes.get(subject.process) or (
        scene.member(subject.pid, subject.start_ticks) if subject.pid else None
    )
    name = process.address if process else (f"pid:{subject.pid}" if subject.pid else "")
    busiest = graph.busiest_lane(scene.lanes, name, subject.pid) if process else None
    phase = subject.phase or (busiest.phase.name if busiest else "")
    return Suspect(
        pid=subject.pid or (process.pid if process else 0),
        start_ticks=subject.start_ticks or (process.start_ticks if process else 0),
        process=subject.process or name,
        role=subject.role or (process.role if process else ""),
        rank=subject.rank or (process.rank if process else 0),
        lane=busiest,
        phase=phase,
    )


def _of_lane(scene: Scene, lane: LaneImage, *, path: tuple[str, ...] = ()) -> Suspect:
    process = scene.process_at(lane.address)
    suspect = _named(lane.pid, lane.start_ticks, lane=lane, process=process)
    late = scene.late(lane.address)
    return replace(suspect, path=path, phase=(late and late.subject.phase) or lane.phase.name)


def _of_process(scene: Scene, process: ProcessImage, kind: Kind | None) -> Suspect:
    """A process as such; its phase is that of its busiest lane."""
    lane = graph.busiest_lane(scene.lanes, process.address, process.pid)
    suspect = _named(process.pid, process.start_ticks, lane=lane, process=process)
    return replace(suspect, kind=kind)


def _named(
    pid: int, ticks: int, *, lane: LaneImage | None, process: ProcessImage | None
) -> Suspect:
    who = process if process is not None and process.pid == pid else lane
    if who is None:
        return Suspect(pid=pid, start_ticks=ticks, process=f"pid:{pid}" if pid else "")
    return Suspect(
        pid=pid,
        start_ticks=ticks,
        process=f"{who.role}:{who.rank}",
        role=who.role,
        rank=who.rank,
        lane=lane,
        phase=lane.phase.name if lane is not None else "",
    )
