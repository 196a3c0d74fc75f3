"""The wait-for graph: who waits for whom, from the lanes of all processes at one instant."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from stallwatch.board.image import BoardImage, LaneClass, LaneImage
from stallwatch.diagnosis.verdict import Edge
from stallwatch.diagnosis.vocabulary import Vocabulary
from stallwatch.watch.snapshot import Snapshot

MAX_TARGETS = 64  # of one wait: bounds what a hostile target string can cost
MAX_CYCLES = 16
IDLE = "idle"  # Edge.why of idle(on=...): weaker than a declared wait

Pick = Callable[[Sequence[str]], str]
"""Chooses among several targets of one wait which one to follow. Never given an empty list."""


def is_remote(target: str, words: Vocabulary) -> bool:
    """A wait target that names something outside this engine: 'remote:...', 'tcp://...'."""
    return target.lower().startswith(words.remote_prefixes)


def open_lanes(snapshot: Snapshot, whom: tuple[int, int] = (0, 0)) -> dict[str, LaneImage]:
    """Open lanes by address. A living owner wins over a dead one's leftover of the same address.

    Two living processes may have attached with the same role and rank: then the lane of `whom`,
    the accused pid and tid, and else the one that has stood still longest.
    """
    out: dict[str, LaneImage] = {}
    for lane in snapshot.image.lanes if snapshot.image else ():
        if lane.closed or not lane.stack:
            continue
        known = out.get(lane.address)
        if known is None or _claim(snapshot, lane, whom) > _claim(snapshot, known, whom):
            out[lane.address] = lane
    return out


def _claim(snapshot: Snapshot, lane: LaneImage, whom: tuple[int, int]) -> tuple[int, ...]:
    """How good a lane's claim to its address is."""
    since = max(lane.phase.entered_ns, lane.phase.progress_ns)
    idle = lane.phase.cls is LaneClass.IDLE
    alive = is_alive(snapshot, lane.pid, lane.start_ticks)
    return (alive, lane.pid == whom[0], lane.tid == whom[1], not idle, -since)


def is_alive(snapshot: Snapshot, pid: int, start_ticks: int) -> bool:
    """That very process lives and is no zombie, as far as this look saw."""
    facts = snapshot.processes.get(pid)
    return facts is not None and facts.start_ticks == start_ticks and facts.state not in "ZX"


def is_stopped(snapshot: Snapshot, pid: int) -> bool:
    """State T and nobody traces it."""
    facts = snapshot.processes.get(pid)
    return facts is not None and facts.state == "T" and not facts.tracer_pid


def targets(spec: str, image: BoardImage | None, lanes: Mapping[str, LaneImage]) -> tuple[str, ...]:
    """The addresses a wait target means: commas separate, `worker:*/model` is every rank.

    A pattern that fits nothing stays as it is: whoever was meant is missing, and that is the answer.
    """
    known = [*lanes, *(p.address for p in (image.processes if image else ()))]
    out: dict[str, None] = {}
    for part in spec.split(",")[:MAX_TARGETS]:
        name = part.strip()
        if not name:
            continue
        # Only '*' is special; a '[' in a hostile name must not become a character class.
        hits = [name]
        if "*" in name:
            pattern = name.replace("[", "[[]")
            level = "/" in name
            hits = [a for a in known if ("/" in a) == level and fnmatchcase(a, pattern)] or [name]
        out.update(dict.fromkeys(hits))
    return tuple(out)[:MAX_TARGETS]


def edges(snapshot: Snapshot, stuck: Collection[str] = ()) -> tuple[Edge, ...]:
    """All edges. `stuck` holds addresses known not to move: idle(on=...) counts only towards those.

    A supplier that is missing, dead or stopped is stuck without being listed.
    """
    lanes = open_lanes(snapshot)
    out: list[Edge] = []
    for address, lane in lanes.items():
        if not lane.wait_on or lane.phase.cls not in (LaneClass.WAIT, LaneClass.IDLE):
            continue
        for target in targets(lane.wait_on, snapshot.image, lanes):
            if target == address:
                continue
            if lane.phase.cls is LaneClass.WAIT:
                out.append(Edge(address, target, lane.phase.name))
            elif _supplier_stuck(snapshot, lanes, target, stuck):
                out.append(Edge(address, target, IDLE))
    return (*out, *_process_edges(lanes, out))


def _supplier_stuck(
    snapshot: Snapshot, lanes: Mapping[str, LaneImage], target: str, stuck: Collection[str]
) -> bool:
    if target in stuck:
        return True
    lane = lanes.get(target)
    if lane is not None:
        alive = is_alive(snapshot, lane.pid, lane.start_ticks)
        return not alive or is_stopped(snapshot, lane.pid)
    if "/" in target:
        return True  # a supplier that is not there supplies nothing
    process = _process(snapshot, target)
    if process is None or not is_alive(snapshot, *process) or is_stopped(snapshot, process[0]):
        return True
    return any(a.startswith(target + "/") for a in stuck)


def _process(snapshot: Snapshot, address: str) -> tuple[int, int] | None:
    for process in snapshot.image.processes if snapshot.image else ():
        if process.address == address and not process.detached:
            return process.pid, process.start_ticks
    return None


def _process_edges(lanes: Mapping[str, LaneImage], found: Iterable[Edge]) -> list[Edge]:
    """A wait for a whole process is a wait for the lane of it that has been busy longest."""
    out = []
    for target in dict.fromkeys(e.target for e in found if "/" not in e.target):
        busiest = busiest_lane(lanes, target)
        if busiest is not None:
            out.append(Edge(target, busiest.address, "busiest lane"))
    return out


def busiest_lane(lanes: Mapping[str, LaneImage], process: str, pid: int = 0) -> LaneImage | None:
    """The lane of a process that has been out of idle longest; None when all are idle.

    pid: only lanes of that very process, when another one may have the same role and rank.
    """
    mine = [
        lane
        for lane in lanes.values()
        if lane.address.startswith(process + "/")
        and lane.phase.cls is not LaneClass.IDLE
        and pid in (0, lane.pid)
    ]
    return min(
        mine, key=lambda lane: max(lane.phase.entered_ns, lane.phase.progress_ns), default=None
    )


@dataclass(frozen=True, slots=True)
class Chain:
    """From a waiter to what it really waits for. `cycle` is not empty when there is no end."""

    path: tuple[str, ...]  # start first, root last
    edges: tuple[Edge, ...] = ()
    cycle: tuple[str, ...] = ()

    @property
    def root(self) -> str:
        return self.path[-1]


def first(options: Sequence[str]) -> str:
    return options[0]


def root(start: str, graph: Iterable[Edge], pick: Pick = first) -> Chain:
    """Follow the edges from `start` to the end. Where one waits for several, `pick` chooses."""
    by_waiter: dict[str, list[Edge]] = {}
    for edge in graph:
        by_waiter.setdefault(edge.waiter, []).append(edge)
    path, taken, here = [start], [], start
    # An idle lane whose supplier waits for it is an end, not a circle: nobody sent it any work.
    while options := [
        e for e in by_waiter.get(here, ()) if not (e.why == IDLE and e.target in path)
    ]:
        chosen = pick([e.target for e in options]) if len(options) > 1 else options[0].target
        edge = next((e for e in options if e.target == chosen), options[0])
        taken.append(edge)
        here = edge.target
        if here in path:
            return Chain(tuple(path), tuple(taken), tuple(path[path.index(here) :]))
        path.append(here)
    return Chain(tuple(path), tuple(taken))


def cycles(graph: Iterable[Edge]) -> tuple[tuple[str, ...], ...]:
    """The circles in the graph (at most 16), each starting at its smallest address."""
    after: dict[str, list[str]] = {}
    for edge in graph:
        after.setdefault(edge.waiter, []).append(edge.target)
    found: dict[tuple[str, ...], None] = {}
    done: set[str] = set()
    for start in sorted(after):
        if start not in done:
            _circles_from(start, after, done, found)
        if len(found) >= MAX_CYCLES:
            break
    return tuple(found)[:MAX_CYCLES]


def _circles_from(
    start: str,
    after: Mapping[str, list[str]],
    done: set[str],
    found: dict[tuple[str, ...], None],
) -> None:
    """Depth first with an explicit stack: a long chain must not meet the recursion limit."""
    path: list[str] = [start]
    on_path = {start}
    work = [iter(after.get(start, ()))]
    while work:
        node = next(work[-1], None)
        if node is None:
            work.pop()
            gone = path.pop()
            on_path.discard(gone)
            done.add(gone)
        elif node in on_path:
            circle = path[path.index(node) :]
            at = circle.index(min(circle))
            found[tuple(circle[at:] + circle[:at])] = None
        elif node not in done:
            path.append(node)
            on_path.add(node)
            work.append(iter(after.get(node, ())))
