"""What earlier looks teach: a pure fold over snapshots. It fills `Recall` and the side progress.

Idle time, pauses and debuggers are kept out of every clock here, so that the rules stay
stateless (SGLang's watchdog counted 9 s of idleness into a 4 s limit).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import NamedTuple

from stallwatch.board.columns import Lineup, Survey
from stallwatch.board.decode import Identity
from stallwatch.board.image import BoardImage, ProcessImage
from stallwatch.board.seen import survey
from stallwatch.watch.grading import starting
from stallwatch.watch.leases import leased, paused_slots
from stallwatch.watch.pace import Pace, keep_pace
from stallwatch.watch.policy import Policy
from stallwatch.watch.side import HelperMemory, SideMemory, observe_helpers, observe_side
from stallwatch.watch.snapshot import ProcFacts, Recall, Snapshot

MAX_INTERVALS = 16  # per lane; beyond it the oldest is forgotten, which only lengthens a clock
MAX_ATTACHED = 4096
NOTHING = Survey(Lineup(()), (), ())

Slots = Mapping[int, tuple[int, int]]  # slot -> (pid, work)


class Counts(NamedTuple):
    """The work counters of all open lanes."""

    lanes: tuple[Identity, ...] = ()
    works: tuple[int, ...] = ()

    def slots(self) -> Slots:
        return {who.slot: (who.pid, work) for who, work in zip(*self, strict=True)}


@dataclass(frozen=True, slots=True)
class Memory:
    """State between looks of one incarnation. Immutable; `remember` makes the next one."""

    incarnation: int = -1
    now_ns: int = 0
    counts: Counts = field(default_factory=Counts)
    base: Slots | None = None  # work at READY
    recall: Recall = field(default_factory=Recall)
    side: SideMemory = field(default_factory=SideMemory)
    helpers: HelperMemory = field(default_factory=HelperMemory)
    pace: Pace = field(default_factory=Pace)


def remember(memory: Memory, snapshot: Snapshot, policy: Policy) -> tuple[Memory, Snapshot]:
    """Fold one raw look in; returns the memory for the next one and the look with its recall."""
    if memory.incarnation != snapshot.engine.incarnation:
        memory = Memory(incarnation=snapshot.engine.incarnation, now_ns=snapshot.now_ns)
    image, old = snapshot.image, memory.recall
    seen_lanes = survey(image) if image is not None else NOTHING
    lineup = seen_lanes.lineup
    counts = _counts(seen_lanes) if image is not None else memory.counts
    watched = bool(lineup.starters) or starting(snapshot.engine)
    workers = _workers(memory.counts, counts) if watched else frozenset()
    worked = _worked(memory.counts, counts) or bool(image and image.moving)
    base = memory.base
    if base is None and snapshot.engine.ready_ns is not None and image is not None:
        base = _base(memory, snapshot, counts)
    traced = _since(old.traced_since_ns, _traced(snapshot.processes.values()), snapshot.now_ns)
    debugged = any(snapshot.now_ns - t < policy.debugger_ns for t in traced.values())
    helpers = observe_helpers(memory.helpers, snapshot, old.attached)
    stuck = _stuck(memory, snapshot, worked=worked, held=debugged or lineup.starting)
    pace = keep_pace(
        memory.pace,
        _works(image) if _paced(policy, memory.pace, snapshot.now_ns, stuck=stuck) else {},
        snapshot.now_ns,
        policy,
        busy=stuck is not None and not debugged and base is not None,
    )
    recall = Recall(
        steps=_steps(old.steps, base, counts, enough=policy.compile_steps),
        stuck_since_ns=stuck,
        attached=_attached(old.attached, image),
        stopped_since_ns=_since(
            old.stopped_since_ns, _stopped(snapshot.processes.values()), snapshot.now_ns
        ),
        traced_since_ns=traced,
        excused=_excused(memory, snapshot, lineup.resting, policy, debugged=debugged),
        compiled_ns=helpers.moved_ns,
        slow=pace.slow,
        held=_held(memory, snapshot, policy, debugged=debugged),
    )
    seen = replace(snapshot, recall=recall)
    side, engine = observe_side(memory.side, seen, workers=workers, starters=lineup.starters)
    seen = replace(seen, engine=engine)
    return (
        Memory(
            incarnation=memory.incarnation,
            now_ns=snapshot.now_ns,
            counts=counts,
            base=base,
            recall=recall,
            side=side,
            helpers=helpers,
            pace=pace,
        ),
        seen,
    )


def _paced(policy: Policy, pace: Pace, now_ns: int, *, stuck: int | None) -> bool:
    """The counters are needed: a window begins or ends."""
    if stuck is None or policy.degraded_ns <= 0:
        return False
    return pace.begun_ns == 0 or now_ns - pace.begun_ns >= policy.degraded_ns


def _works(image: BoardImage | None) -> Mapping[int, tuple[int, int, int]]:
    """Pid, work and beats of each lane with a thread, by slot."""
    lanes = image.lanes if image is not None else ()
    return {x.slot: (x.pid, x.work, x.beats) for x in lanes if not (x.closed or x.channel)}


def _counts(seen: Survey) -> Counts:
    return Counts(seen.lineup.who, tuple(compress(seen.works, seen.lineup.judged)))


def _worked(old: Counts, new: Counts) -> bool:
    """Whether any counter of a lane that was there before changed."""
    if old.lanes == new.lanes:  # the usual case, and several times cheaper
        return old.works != new.works
    return bool(_workers(old, new))


def _workers(old: Counts, new: Counts) -> frozenset[int]:
    """Pids whose own work counters changed. A lane that appears is no progress."""
    then = old.slots()
    return frozenset(
        pid
        for slot, (pid, work) in new.slots().items()
        if (before := then.get(slot)) is not None and before[0] == pid and before[1] != work
    )


def _base(memory: Memory, snapshot: Snapshot, counts: Counts) -> Slots:
    """Where the steps since READY begin: at the look before the first one that knows of READY.

    A quick engine serves its first requests between these two looks. They count: else it could
    stand in its tenth step and have the limit of its first.
    """
    before = memory.counts if memory.now_ns < snapshot.now_ns else Counts()
    return (before if before.lanes else counts).slots()


def _steps(known: int | None, base: Slots | None, counts: Counts, *, enough: int) -> int:
    """Work since READY of the lane that did most: not every lane of an engine counts steps.

    Once `enough` are counted the number stands: nobody asks any further.
    """
    if base is None:
        return 0
    if known is not None and known >= enough:
        return known
    most = 0
    for slot, (pid, work) in counts.slots().items():
        then = base.get(slot)
        most = max(most, work - then[1] if then and then[0] == pid and then[1] <= work else work)
    return most


def _stuck(memory: Memory, snapshot: Snapshot, *, worked: bool, held: bool) -> int | None:
    """Since when work is pending and none is done; None while nothing is pending."""
    image, since = snapshot.image, memory.recall.stuck_since_ns
    if image is None:
        return since
    if not any(p.pending > 0 and not p.detached for p in image.processes):
        return None
    if worked or since is None:
        return snapshot.now_ns
    leased = any(p.pause is not None and not p.detached for p in image.processes)
    if held or leased:
        return min(snapshot.now_ns, since + max(0, snapshot.now_ns - memory.now_ns))
    return since


def _attached(
    old: Mapping[int, ProcessImage], image: BoardImage | None
) -> Mapping[int, ProcessImage]:
    """Sticky: a dead process's slot may be reused before its exit is judged."""
    if image is None or all(_known(old.get(p.pid), p) for p in image.processes):
        return old
    merged = {**old, **{p.pid: p for p in image.processes}}
    while len(merged) > MAX_ATTACHED:
        merged.pop(next(iter(merged)))
    return merged


def _known(old: ProcessImage | None, new: ProcessImage) -> bool:
    """Pending counts change at every look; only who it is and its farewell matter here."""
    return old is new or (
        old is not None
        and old.start_ticks == new.start_ticks
        and old.detached == new.detached
        and (old.role, old.rank) == (new.role, new.rank)
    )


def _stopped(processes: Iterable[ProcFacts]) -> Iterable[int]:
    return (p.pid for p in processes if p.state == "T" and p.tracer_pid == 0)


def _traced(processes: Iterable[ProcFacts]) -> Iterable[int]:
    """The looker writes only foreign tracers into tracer_pid."""
    return (p.pid for p in processes if p.tracer_pid != 0)


def _since(old: Mapping[int, int], pids: Iterable[int], now_ns: int) -> Mapping[int, int]:
    return {pid: old.get(pid, now_ns) for pid in pids}


def _held(
    memory: Memory, snapshot: Snapshot, policy: Policy, *, debugged: bool
) -> tuple[tuple[int, int], ...]:
    """Add the time since the last look if a lease or a debugger held the engine up in it."""
    image, old = snapshot.image, memory.recall.held
    if debugged or (image is not None and leased(image, snapshot.now_ns, policy)):
        return _extend(old, memory.now_ns, snapshot.now_ns)
    return old


def _excused(
    memory: Memory, snapshot: Snapshot, resting: frozenset[int], policy: Policy, *, debugged: bool
) -> Mapping[int, tuple[tuple[int, int], ...]]:
    """Add the time since the last look to every lane that is excused at this one.

    `resting`: the outer phase above an idle one must not age while the lane waits for work.
    """
    image, old = snapshot.image, memory.recall.excused
    if image is None:
        return old
    held = resting | paused_slots(image, snapshot.now_ns, policy)
    if not (debugged or held or old):
        return old
    out: dict[int, tuple[tuple[int, int], ...]] = {}
    for lane in image.lanes:
        if lane.closed or not lane.stack:
            continue
        kept = old.get(lane.slot, ())
        if debugged or lane.slot in held:
            kept = _extend(kept, memory.now_ns, snapshot.now_ns)
        # What ended before the outermost phase began can overlap with no clock any more.
        kept = tuple(i for i in kept if i[1] > lane.stack[0].entered_ns)
        if kept:
            out[lane.slot] = kept
    return out


def _extend(kept: tuple[tuple[int, int], ...], begin: int, end: int) -> tuple[tuple[int, int], ...]:
    if end <= begin:
        return kept
    if kept and kept[-1][1] >= begin:
        return (*kept[:-1], (kept[-1][0], end))
    return (*kept, (begin, end))[-MAX_INTERVALS:]
