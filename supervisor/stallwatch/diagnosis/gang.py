"""Ranks that work in step: which one differs. The ranks that wait are victims."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from stallwatch.board.image import LaneClass, LaneImage
from stallwatch.diagnosis import graph
from stallwatch.diagnosis.kinds import Kind
from stallwatch.diagnosis.scene import Scene
from stallwatch.diagnosis.verdict import Edge

COLLECTIVE = "collective"  # Edge.why of a wait that only the ranks' places tell
_DIVERGED = (Kind.COLLECTIVE_DIVERGENCE,)
_TROUBLE = re.compile(r"\b(ERROR|CRITICAL|FATAL)\b|Traceback \(most recent call last\)|\b\w+Error:")


@dataclass(frozen=True, slots=True)
class Odd:
    """lane None: no rank differs enough to be named; `reason` says what was compared."""

    lane: LaneImage | None
    reason: str
    hints: tuple[Kind, ...] = ()


def pick(scene: Scene, options: Sequence[str]) -> str:
    """Of several lanes that one lane waits for: the one to follow."""
    lanes = [scene.lanes[o] for o in options if o in scene.lanes]
    for option in options:
        lane = scene.lanes.get(option)
        if lane is not None and (not scene.alive(lane) or graph.is_stopped(scene.look, lane.pid)):
            return option
    # One answer per gang: sixty-four ranks must not be compared sixty-four times.
    for lane in {(x.role, x.name): x for x in lanes}.values():
        odd = odd_one(scene, lane)
        if odd is not None and odd.lane is not None and odd.lane.address in options:
            return odd.lane.address
    stuck = [x for x in lanes if scene.stuck(x)]
    # No lane differs: whoever has been at it longest; a wait or idle lane only if there is no worker.
    if stuck:
        return min(stuck, key=lambda x: (x.phase.cls is LaneClass.WAIT, scene.since_ns(x))).address
    return lanes[0].address if lanes else options[0]


def odd_one(scene: Scene, lane: LaneImage) -> Odd | None:
    """The rank that differs from the others of its gang; None when the lane has no gang."""
    ranks = scene.gang(lane)
    if len(ranks) < 2:
        return None
    busy = [x for x in ranks if x.phase.cls is not LaneClass.IDLE]
    idle = [x for x in ranks if x.phase.cls is LaneClass.IDLE]
    if not busy:
        return Odd(None, f"all {len(ranks)} ranks are idle")
    if any(scene.moved(x) for x in busy):
        return None  # they do not work in step: independent replicas
    return _left(scene, busy, idle) if idle else _differs(scene, busy)


def _left(scene: Scene, busy: Sequence[LaneImage], idle: Sequence[LaneImage]) -> Odd:
    """Some ranks execute, some are idle: did the idle ones fail the step, or finish it?

    The work counter alone cannot tell: a step that failed may be counted as answered.
    """
    fewest = min(busy, key=lambda x: x.work)
    low = min(idle, key=lambda x: x.work)
    seen = f"{fewest.address} is in {fewest.phase.name} (work {fewest.work})"
    if low.work < fewest.work:
        return Odd(low, f"{low.address} is idle with work {low.work} while {seen}", _DIVERGED)
    for lane in idle:
        if said := said_error(scene, lane.pid):
            hints = (Kind.ERROR_SWALLOWED, *_DIVERGED)
            return Odd(
                lane, f"{lane.address} is idle while {seen}, and its log says: {said}", hints
            )
    if all(scene.in_collective(x) for x in busy):
        return Odd(low, f"{low.address} is idle while {seen} inside a collective", _DIVERGED)
    if low.work == fewest.work and low.work > 0:
        return Odd(low, f"{low.address} is idle with work {low.work} while {seen}", _DIVERGED)
    return Odd(
        fewest, f"{seen} while {low.address} is idle (work {low.work}) and has nothing to do"
    )


def _differs(scene: Scene, busy: Sequence[LaneImage]) -> Odd:
    """All execute: the lowest step, then the rare phase, then who is not in the collective."""
    by_work = sorted(busy, key=lambda x: x.work)
    if by_work[0].work < by_work[1].work:
        return Odd(
            by_work[0],
            f"{by_work[0].address} has work {by_work[0].work}, the other ranks {by_work[1].work} or more",
            _DIVERGED,
        )
    odd = _minority([(x, x.phase.name) for x in busy])
    if odd is not None:
        return Odd(odd, f"{odd.address} is the only rank in {odd.phase.name}", _DIVERGED)
    outside = [x for x in busy if scene.in_collective(x) is False]
    inside = [x for x in busy if scene.in_collective(x)]
    if len(outside) == 1 and len(inside) == len(busy) - 1:
        reason = f"{outside[0].address} is the only rank that is not inside a collective"
        return Odd(outside[0], reason)
    tops = [(x, str(_top(scene, x))) for x in busy if _top(scene, x)]
    odd = _minority(tops) if len(tops) == len(busy) else None
    if odd is not None:
        return Odd(odd, f"{odd.address} is the only rank in {_top(scene, odd)}")
    same = len(tops) == len(busy) and len({top for _, top in tops}) == 1
    if same and not inside:
        return Odd(None, f"all {len(busy)} ranks are in {tops[0][1]}")
    return Odd(None, f"{len(busy)} ranks execute, and none differs clearly", _DIVERGED)


def edges_to(lane: LaneImage, ranks: Sequence[LaneImage]) -> tuple[Edge, ...]:
    """Ranks in a collective wait for the one that did not come: nobody declares such a wait."""
    waiting = [x for x in ranks if x.address != lane.address][: graph.MAX_TARGETS]
    return tuple(Edge(x.address, lane.address, COLLECTIVE) for x in waiting)


def _minority(named: Sequence[tuple[LaneImage, str]]) -> LaneImage | None:
    """The one lane whose name nobody shares while all others share one (three ranks at least)."""
    counts = Counter(name for _, name in named)
    if len(named) < 3 or len(counts) != 2 or 1 not in counts.values():
        return None
    return next(lane for lane, name in named if counts[name] == 1)


def _top(scene: Scene, lane: LaneImage) -> str:
    frame = scene.thread(lane).frame(scene.words)
    return frame.name if frame is not None else ""


def said_error(scene: Scene, pid: int) -> str:
    """The last line of the log tail in which that process reports an error, or ''."""
    mark = re.compile(rf"\bpid[=: ]{pid}\b")
    for line in reversed(scene.case.log_tail):
        if mark.search(line) and _TROUBLE.search(line):
            return line.strip()[:160]
    return ""


def last_trouble(scene: Scene, within: int = 60) -> str:
    """The last line near the end of the log that reports an error, or ''."""
    for line in reversed(scene.case.log_tail[-within:]):
        if _TROUBLE.search(line):
            return line.strip()[:160]
    return ""
