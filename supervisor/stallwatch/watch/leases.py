"""Who is excused right now: processes under a pause lease, and whoever waits for them."""

from __future__ import annotations

from stallwatch.board.image import BoardImage, LaneClass, LaneImage, PauseLease
from stallwatch.watch.policy import Policy


def lease_end(lease: PauseLease, policy: Policy) -> int:
    """When the lease ends, in ns; an absurdly long one ends at the cap (it must never mute)."""
    return min(lease.until_ns, lease.entered_ns + policy.pause_cap_ns)


def leased(image: BoardImage, now_ns: int, policy: Policy) -> bool:
    """Whether some attached process is under a lease that has not run out."""
    leases = (p.pause for p in image.processes if p.pause is not None and not p.detached)
    return any(now_ns < lease_end(lease, policy) for lease in leases)


def overlap(intervals: tuple[tuple[int, int], ...], since_ns: int) -> int:
    """How much of the time from `since_ns` on lies in the intervals."""
    return sum(max(0, end - max(begin, since_ns)) for begin, end in intervals)


def paused_slots(image: BoardImage, now_ns: int, policy: Policy) -> frozenset[int]:
    """Slots of the lanes that a pause explains: those of paused processes and their waiters.

    A lease that has run out still explains who waits or idles, and only PAUSE_EXPIRED speaks of it.
    A lane at WORK is explained no longer: it is judged again, the time of the lease not counted, or
    a lease that nobody ends would be a mute.
    """
    leases = {p.pid: p.pause for p in image.processes if p.pause is not None and not p.detached}
    if not leases:
        return frozenset()
    expired = {pid for pid, lease in leases.items() if now_ns >= lease_end(lease, policy)}
    targets = {p.address for p in image.processes if p.pid in leases}
    slots = {
        lane.slot
        for lane in image.lanes
        if lane.pid in leases and not (lane.pid in expired and _works(lane))
    }
    targets.update(lane.address for lane in image.lanes if lane.slot in slots)
    waiting = [w for w in image.lanes if w.slot not in slots and w.phase.cls is LaneClass.WAIT]
    # A chain api -> core -> worker is excused link by link; each round settles at least one lane.
    for _ in range(len(waiting)):
        more = [lane for lane in waiting if lane.slot not in slots and _waits_for(lane, targets)]
        if not more:
            break
        slots.update(lane.slot for lane in more)
        targets.update(lane.address for lane in more)
    return frozenset(slots)


def _works(lane: LaneImage) -> bool:
    return bool(lane.stack) and lane.phase.cls is LaneClass.WORK


def _waits_for(lane: LaneImage, targets: set[str]) -> bool:
    if not lane.wait_on:
        return False
    return lane.wait_on in targets or lane.wait_on.partition("/")[0] in targets
