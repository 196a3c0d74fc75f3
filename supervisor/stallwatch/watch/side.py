"""Side progress: what moves beside a silent start. Pure.

A load or a compile reports nothing for minutes, yet memory grows, bytes flow or compiler children
burn CPU. A process's own CPU proves nothing (a spin looks the same: SGLang 3752), nor does the CPU
of a child that has lanes of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from stallwatch.watch.grading import starting
from stallwatch.watch.policy import S
from stallwatch.watch.snapshot import EngineFacts, ProcFacts, Snapshot

WINDOW_NS = 5 * S
# Growth within one window that counts. Smaller than this is noise: polling threads read eventfds.
RSS_PAGES = 256
IO_BYTES = 65536
CPU_TICKS = 50  # 0.5 s in 5 s
MAJOR_FAULTS = 64  # pages of a mapped file that come from slow storage; memory may not grow by them
UNREAD = -1


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a process stood when its window began."""

    at_ns: int
    start_ticks: int
    rss_pages: int
    io_bytes: int  # UNREAD: the kernel was not asked
    child_ticks: int
    major_faults: int = 0


@dataclass(frozen=True, slots=True)
class SideMemory:
    marks: Mapping[int, Mark] = field(default_factory=dict)
    moved_ns: Mapping[int, int] = field(default_factory=dict)
    engine_ns: int = 0


def observe_side(
    memory: SideMemory,
    snapshot: Snapshot,
    *,
    workers: Collection[int] = frozenset(),
    starters: Collection[int] = frozenset(),
) -> tuple[SideMemory, EngineFacts]:
    """Fold one look in; the facts come back with both side-progress fields filled.

    `workers`: pids whose own work counters moved since the last look; `starters`: pids inside a
    START phase. While the engine starts everybody is watched, afterwards only those.
    """
    processes = snapshot.processes
    watched: Collection[int] = [pid for pid in starters if pid in processes]
    if starting(snapshot.engine):
        watched = processes.keys()
    if not watched:
        last = memory if not memory.marks else SideMemory(engine_ns=memory.engine_ns)
        return last, replace(snapshot.engine, side_progress_ns=memory.engine_ns)
    children = _children_ticks(snapshot)
    now = snapshot.now_ns
    marks: dict[int, Mark] = {}
    moved: dict[int, int] = {}
    engine_ns = memory.engine_ns
    for pid in watched:
        fresh = _mark(processes[pid], children.get(pid, 0), now)
        mark = memory.marks.get(pid)
        if mark is None or mark.start_ticks != fresh.start_ticks:
            marks[pid], moved[pid] = fresh, now
            continue
        moved[pid] = memory.moved_ns.get(pid, now)
        if pid in workers or _grew(mark, fresh):
            marks[pid], moved[pid] = fresh, now
            engine_ns = max(engine_ns, now)
        else:
            marks[pid] = fresh if now - mark.at_ns >= WINDOW_NS else mark
    facts = replace(snapshot.engine, side_progress_ns=engine_ns, pid_side_progress_ns=moved)
    return SideMemory(marks=marks, moved_ns=moved, engine_ns=engine_ns), facts


def _mark(facts: ProcFacts, children: int, now_ns: int) -> Mark:
    unread = facts.read_bytes is None and facts.written_bytes is None
    return Mark(
        at_ns=now_ns,
        start_ticks=facts.start_ticks,
        rss_pages=facts.rss_pages,
        io_bytes=UNREAD if unread else (facts.read_bytes or 0) + (facts.written_bytes or 0),
        child_ticks=facts.child_ticks + children,
        major_faults=facts.major_faults,
    )


def _grew(old: Mark, new: Mark) -> bool:
    return (
        abs(new.rss_pages - old.rss_pages) >= RSS_PAGES
        or (old.io_bytes != UNREAD and new.io_bytes - old.io_bytes >= IO_BYTES)
        or new.major_faults - old.major_faults >= MAJOR_FAULTS
        or new.child_ticks - old.child_ticks >= CPU_TICKS
    )


@dataclass(frozen=True, slots=True)
class HelperMemory:
    """CPU of helpers without lanes, by the attached process that they work for."""

    marks: Mapping[int, tuple[int, int]] = field(default_factory=dict)  # pid -> (at, ticks)
    moved_ns: Mapping[int, int] = field(default_factory=dict)


def observe_helpers(
    memory: HelperMemory, snapshot: Snapshot, attached: Collection[int]
) -> HelperMemory:
    """Fold one look in: who has helpers that burn CPU, half a second of it in five at least."""
    known = {p.pid for p in snapshot.image.processes} if snapshot.image else set()
    if all(pid in known or pid in attached for pid in snapshot.processes):
        return memory if not memory.marks else HelperMemory()
    now = snapshot.now_ns
    marks: dict[int, tuple[int, int]] = {}
    moved: dict[int, int] = {}
    for pid, living in _children_ticks(snapshot).items():
        if pid not in snapshot.processes:
            continue
        ticks = living + snapshot.processes[pid].child_ticks  # of helpers that have ended
        at, before = memory.marks.get(pid, (now, ticks))
        if ticks - before >= CPU_TICKS:
            moved[pid], marks[pid] = now, (now, ticks)
            continue
        # A helper that ended moves from one sum to the other, never back: fewer ticks are a new one.
        fresh = ticks < before or now - at >= WINDOW_NS
        marks[pid] = (now, ticks) if fresh else (at, before)
        if pid in memory.moved_ns:
            moved[pid] = memory.moved_ns[pid]
    return HelperMemory(marks, moved)


def _children_ticks(snapshot: Snapshot) -> Mapping[int, int]:
    """CPU of helpers without lanes, summed on the nearest attached ancestor (or the root)."""
    attached = {p.pid for p in snapshot.image.processes} if snapshot.image else set()
    attached.update(snapshot.recall.attached)
    sums: dict[int, int] = {}
    for pid, facts in snapshot.processes.items():
        if pid in attached:
            continue
        above = facts.ppid
        for _ in range(64):  # a loop in hostile or torn ppids must end
            parent = snapshot.processes.get(above)
            if parent is None:
                break
            sums[above] = sums.get(above, 0) + facts.cpu_ticks + facts.child_ticks
            if above in attached:
                break
            above = parent.ppid
    return sums
