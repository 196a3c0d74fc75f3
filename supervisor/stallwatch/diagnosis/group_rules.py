"""Rules about several lanes at once: circles, odd ranks, lost messages, loops that do nothing. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from stallwatch.board.image import LaneClass, LaneImage
from stallwatch.diagnosis import describe, gang
from stallwatch.diagnosis import frames as fr
from stallwatch.diagnosis.call import Call, Facts
from stallwatch.diagnosis.kinds import Kind
from stallwatch.diagnosis.vocabulary import prefixed
from stallwatch.watch.finding import NOTHING_DONE, Rule


def order_cycle(f: Facts) -> Call | None:
    """K03: the wait-for graph has no end. Declared by all its lanes, and none moved: certain."""
    if f.suspect.kind is not Kind.ORDER_CYCLE:
        return None
    lanes = [f.scene.lanes[a] for a in f.suspect.cycle if a in f.scene.lanes]
    awake = [x for x in lanes if not x.channel and f.scene.thread(x).running]
    reason = "each lane of the circle declared its wait and did not move"
    if awake:
        return Call(
            Kind.ORDER_CYCLE, "medium", (reason, f"but the thread of {awake[0].address} runs")
        )
    busy = next((x for x in lanes if _shows_no_wait(f, x)), None)
    if busy is not None:
        but = f"but the frames of {busy.address} show no wait"
        return Call(Kind.ORDER_CYCLE, "medium", (reason, but))
    return Call(Kind.ORDER_CYCLE, "high", (reason,))


def _shows_no_wait(f: Facts, lane: LaneImage) -> bool:
    """It has a stack, and no sample of it is in a wait of any kind: what it declared may be left behind.

    A futex says nothing: locks sleep in it, and so does whatever a library of C does.
    """
    thread, words = f.scene.thread(lane), f.words
    if lane.channel or not thread.samples:
        return False
    kernel = prefixed(thread.wchan, words.host_wchans) and not thread.wchan.startswith(
        words.timed_wchans
    )
    return not kernel and not any(fr.shows_wait(s.frames, words) for s in thread.samples)


def divergence(f: Facts) -> Call | None:
    """K02: one rank left the step, or is in another one. Those that wait are victims."""
    lane, suspect = f.suspect.lane, f.suspect
    if lane is None or not suspect.odd or Kind.COLLECTIVE_DIVERGENCE not in suspect.hints:
        return None
    if suspect.hints[0] is Kind.ERROR_SWALLOWED:
        return None
    others = [x for x in f.scene.gang(lane) if x.address != lane.address]
    inside = [x for x in others if f.scene.in_collective(x)]
    reason = f"{describe.count(len(inside), 'other rank')} in a collective" if inside else ""
    edges = gang.edges_to(lane, inside or [x for x in others if f.scene.stuck(x)])
    if lane.phase.cls is LaneClass.IDLE:
        sure = bool(others) and len(inside) == len(others) and bool(f.thread.samples)
        level = "high" if sure else "medium"
        return Call(Kind.COLLECTIVE_DIVERGENCE, level, (reason,), edges=edges)
    waits = f.scene.in_collective(lane) or lane.phase.cls is LaneClass.WAIT
    if waits:
        reasons = (reason, f"{lane.address} is in another")
        return Call(Kind.COLLECTIVE_DIVERGENCE, "high", reasons, edges=edges)
    behind = all(x.work > lane.work for x in others)
    said = "it sleeps elsewhere" if f.thread.asleep else "it has not come to it"
    if behind or inside:
        # Its own trouble or a collective that it skipped: both look like this.
        return Call(
            Kind.COLLECTIVE_DIVERGENCE,
            "medium",
            (reason, said),
            others=(Kind.DEVICE_WAIT,),
            edges=edges,
        )
    return None


def error_swallowed(f: Facts) -> Call | None:
    """K11: a fatal line in the log, and after it nothing. A log is a hint, so never certain."""
    if f.suspect.remote or not (f.scene.finding_is_whole or _useless(f)):
        return None
    said = gang.said_error(f.scene, f.suspect.pid) if f.suspect.pid else ""
    if said:
        return Call(Kind.ERROR_SWALLOWED, "medium", (f"its log says: {said}",))
    line = gang.last_trouble(f.scene)
    if not line or _only_moving(f):
        return None
    return Call(
        Kind.ERROR_SWALLOWED,
        "medium",
        (f"the log ends in an error: {line}", "which process wrote it is not known"),
        others=(Kind.LOST_WAKEUP,) if f.scene.finding_is_whole else (),
    )


def _useless(f: Facts) -> bool:
    """Idle although somebody waits for it, or asleep by design inside its work."""
    lane = f.suspect.lane
    if lane is None:
        return False
    if lane.phase.cls is LaneClass.IDLE:
        return True
    timed = f.thread.wchan.startswith(f.words.timed_wchans)
    return f.thread.asleep and (timed or bool(f.thread.waits_for(f.words)))


def _only_moving(f: Facts) -> bool:
    """Loops turn: an old error in the log explains nothing."""
    return f.scene.finding_is_whole and any(True for _ in turning(f))


def lost_wakeup(f: Facts) -> Call | None:
    """K04: all wait in their normal idle place, and yet work is pending. The channel is accused."""
    if f.suspect.remote:
        return None
    if f.suspect.hints and f.suspect.hints[0] is Kind.NO_FORWARD_PROGRESS:
        return None
    pair = _broken_pair(f)
    if pair is not None:
        return pair
    if f.scene.finding.rule not in NOTHING_DONE or any(True for _ in turning(f)):
        return None
    lanes = [x for x in f.scene.lanes.values() if not f.scene.is_loop(x)]
    if not lanes or not all(x.phase.cls is LaneClass.IDLE for x in lanes):
        return None
    shown = [x for x in lanes if f.scene.thread(x).samples]
    if not shown or not all(_rests(f, x) for x in shown):
        return None
    reason = f"all {describe.count(len(lanes), 'lane')} idle in their normal place, work is pending"
    fed = [x for x in lanes if x.wait_on and x.wait_on in f.scene.lanes]
    channel = f"{fed[0].wait_on} -> {fed[0].address}" if len(fed) == 1 else ""
    return Call(
        Kind.LOST_WAKEUP, "medium", (reason,), channel=channel, others=(Kind.REMOTE_PEER_WAIT,)
    )


def _broken_pair(f: Facts) -> Call | None:
    """Writer and reader of one channel: they count differently, or one waits and the other idles."""
    for reader in f.scene.lanes.values():
        writer = f.scene.lanes.get(reader.wait_on) if reader.wait_on else None
        if writer is None or reader.phase.cls is not LaneClass.IDLE:
            continue  # a poll of the reader may move it: what counts is what it has seen
        sent = _count(writer, f.words.sent_details)
        seen = _count(f.scene.latest(reader), f.words.seen_details)  # nothing came since
        if sent is not None and seen is not None and sent > seen and _rests(f, reader):
            channel = f"{writer.address} -> {reader.address}"
            reason = f"on the channel {channel} {sent} were sent and {seen} seen"
            return Call(Kind.LOST_WAKEUP, "high", (reason,), channel=channel)
    path, lane = f.suspect.path, f.suspect.lane
    if len(path) < 2 or lane is None or f.suspect.odd or lane.address != path[-1]:
        return None
    waiter = f.scene.lanes.get(path[-2])
    if waiter is None or waiter.phase.cls is not LaneClass.WAIT:
        return None
    if lane.phase.cls is not LaneClass.IDLE or f.scene.moved(lane) or not _rests(f, lane):
        return None
    channel = f"{waiter.address} -> {lane.address}"
    reason = f"{waiter.address} waits for {lane.address}, which sleeps in its normal idle place"
    return Call(
        Kind.LOST_WAKEUP,
        "medium",
        (reason, "either the request or the answer was lost"),
        channel=channel,
        others=(Kind.ERROR_SWALLOWED,),
    )


def _count(lane: LaneImage, names: frozenset[str]) -> int | None:
    return next((n for name, n in lane.details if name.lower() in names), None)


def _rests(f: Facts, lane: LaneImage) -> bool:
    """Asleep in a wait, with a stack that shows it, and no CPU."""
    thread = f.scene.thread(lane)
    if lane.channel or not thread.samples or not thread.asleep:
        return False
    by_design = thread.waits_for(f.words) or prefixed(thread.wchan, f.words.host_wchans)
    return bool(by_design) or thread.wchan.startswith(f.words.lock_wchans)


def turning(f: Facts) -> Iterator[LaneImage]:
    """Lanes that turn, those apart that only poll or keep an event loop's time."""
    return (lane for lane in f.scene.lanes.values() if f.scene.turns(lane))


def no_forward_progress(f: Facts) -> Call | None:
    """K05: the loop turns and schedules nothing; work is pending and its counter is flat."""
    lane = f.suspect.lane
    if f.scene.finding.rule not in NOTHING_DONE or lane is None or not f.scene.moved(lane):
        return None
    if f.scene.finding.rule is Rule.REQUEST_SILENT and _worked(f, lane):
        return None  # it computes, and nothing of it arrives
    if f.suspect.remote:
        return None
    pending = sum(p.pending for p in f.scene.processes.values() if not p.detached)
    beats = f.scene.beats_between(lane)
    reason = f"{lane.address} moved at {beats} looks and did no work, {pending} pending"
    sure = f.scene.seen_working(lane)
    more = () if sure else ("it was seen idle at every look: it may only poll",)
    others = () if sure else (Kind.LOST_WAKEUP,)
    return Call(
        Kind.NO_FORWARD_PROGRESS, "high" if sure else "medium", (reason, *more), others=others
    )


def _worked(f: Facts, lane: LaneImage) -> bool:
    """Whether its counter of work grew since the suspicion began."""
    image = f.scene.case.before.image
    before = [x for x in image.lanes if x.address == lane.address] if image else []
    return not before or before[0].work != lane.work


def remote_peer(f: Facts) -> Call | None:
    """K06: the chain of waits leaves this engine. The peer is accused, not whoever waits for it."""
    if not f.suspect.remote:
        return None
    path = f.suspect.path
    waiter = f.scene.lanes.get(path[-2]) if len(path) > 1 else None
    reason = (
        f"{waiter.address if waiter else 'a lane'} declared that it waits for {f.suspect.remote}"
    )
    if waiter is None:
        return Call(Kind.REMOTE_PEER_WAIT, "medium", (reason,))
    thread = f.scene.thread(waiter)
    others = [x for x in f.scene.lanes.values() if x.pid != waiter.pid and f.scene.stuck(x)]
    sure = (thread.asleep and bool(thread.samples)) or f.scene.moved(waiter)
    more = () if others else ("everything else of the engine idles or moves",)
    return Call(Kind.REMOTE_PEER_WAIT, "high" if sure else "medium", (reason, *more))


def degraded(f: Facts) -> Call | None:
    """K22: it moves, far slower than it did."""
    if f.scene.finding.rule is not Rule.DEGRADED:
        return None
    return Call(Kind.DEGRADED, "high", f.scene.finding.notes)
