"""The case indexed for questions: which lane, which process, did it move, what did it show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from stallwatch.board.image import BoardImage, LaneClass, LaneImage, ProcessImage
from stallwatch.diagnosis import frames as fr
from stallwatch.diagnosis import graph
from stallwatch.diagnosis.signals import Process, Thread, process_signals
from stallwatch.diagnosis.verdict import Case, Edge
from stallwatch.diagnosis.vocabulary import Vocabulary
from stallwatch.evidence.model import Frame
from stallwatch.watch.finding import NOTHING_DONE, Finding, Level, Rule
from stallwatch.watch.snapshot import Snapshot


class Scene:
    """Read-only view of one case. Signals are extracted at the first question and kept."""

    def __init__(self, case: Case, words: Vocabulary) -> None:
        self.case = case
        self.words = words
        self.finding = case.finding
        self.look = _with_board(case)
        subject = case.finding.subject
        self.lanes = graph.open_lanes(self.look, (subject.pid, subject.tid))
        self.processes = _processes(self.look, subject.pid)
        self._signals: dict[tuple[int, int], Process] = {}
        self._late = {
            f.subject.lane: f
            for f in sorted((case.finding, *case.findings), key=lambda f: f.level is Level.OVER)
            if f.subject.lane and self._is_of(f)
        } | ({case.finding.subject.lane: case.finding} if case.finding.subject.lane else {})
        self._elsewhen = _elsewhen(case)
        self.edges = self._edges()

    def _is_of(self, finding: Finding) -> bool:
        """The finding is about the lane that has this address here, not about its namesake."""
        lane = self.lanes.get(finding.subject.lane)
        return lane is None or finding.subject.pid in (0, lane.pid)

    def namesakes(self, address: str) -> list[int]:
        """Pids of the living processes that attached with this role and rank, if several did."""
        image, name = self.look.image, address.partition("/")[0]
        pids = {
            p.pid
            for p in (image.processes if image else ())
            if p.address == name and not p.detached and self.alive(p)
        }
        return sorted(pids) if len(pids) > 1 else []

    @property
    def starting(self) -> bool:
        return self.case.snapshot.engine.ready_ns is None

    def signals(self, pid: int, ticks: int = 0) -> Process:
        key = pid, ticks
        if key not in self._signals:
            self._signals[key] = process_signals(self.case, pid, ticks)
        return self._signals[key]

    def of(self, lane: LaneImage) -> Process:
        return self.signals(lane.pid, lane.start_ticks)

    def thread(self, lane: LaneImage) -> Thread:
        return self.of(lane).thread(lane.tid)

    def alive(self, lane: LaneImage | ProcessImage) -> bool:
        return graph.is_alive(self.look, lane.pid, lane.start_ticks)

    def late(self, address: str) -> Finding | None:
        """The finding about this lane, the one that exceeds a limit first."""
        return self._late.get(address)

    def since_ns(self, lane: LaneImage) -> int:
        """When the lane last did anything: entered its phase or progressed in it."""
        return max(lane.phase.entered_ns, lane.phase.progress_ns)

    def age_s(self, lane: LaneImage) -> float:
        return max(0, self.look.now_ns - self.since_ns(lane)) / 1e9

    def moved(self, lane: LaneImage) -> bool:
        """It did something between the earliest and the latest look."""
        if self.since_ns(lane) > self.case.before.now_ns:
            return True
        return any(
            (other.beats, other.work, other.stack) != (lane.beats, lane.work, lane.stack)
            for other in self._elsewhen.get((lane.slot, lane.pid), ())
            if (other.role, other.rank, other.name) == (lane.role, lane.rank, lane.name)
        )

    def stuck(self, lane: LaneImage) -> bool:
        """Busy, and it did not move while we watched; or a rule says that it is late."""
        if lane.phase.cls is LaneClass.IDLE:
            return False
        return not self.moved(lane) if self.late(lane.address) is None else True

    def mates(self, lane: LaneImage) -> list[LaneImage]:
        """Other open lanes of the same process."""
        return [
            other
            for other in self.lanes.values()
            if (other.pid, other.start_ticks) == (lane.pid, lane.start_ticks)
            and other.address != lane.address
        ]

    def gang(self, lane: LaneImage) -> list[LaneImage]:
        """The same lane of every living rank, itself included; alone unless the role works in step."""
        if lane.role.lower() not in self.words.gang_roles:
            return [lane]
        return [
            other
            for other in self.lanes.values()
            if (other.role, other.name) == (lane.role, lane.name)
            and (self.alive(other) or other is lane)
        ]

    def silent(self, pid: int) -> bool:
        """No lane of that process moved; False when it has none."""
        mine = [lane for lane in self.lanes.values() if lane.pid == pid and not lane.channel]
        return bool(mine) and not any(self.moved(lane) for lane in mine)

    @property
    def finding_is_whole(self) -> bool:
        """The rule spoke of the engine as a whole: work is pending and none gets done."""
        return self.finding.rule in NOTHING_DONE

    def others(self, lane: LaneImage) -> list[LaneImage]:
        """Every other open lane, those of event loops apart."""
        return [x for x in self.lanes.values() if x.address != lane.address and not self.is_loop(x)]

    def is_loop(self, lane: LaneImage) -> bool:
        """An event loop's own beat: it turns whatever the engine does."""
        return (
            lane.role.lower() in self.words.frontend_roles
            and lane.name.lower() in self.words.frontend_lanes
        )

    def in_collective(self, lane: LaneImage) -> bool | None:
        """Inside a collective operation, by its phase or its frames? None: neither can tell."""
        if lane.phase.name.lower() in self.words.collective_names:
            return True
        samples = self.thread(lane).samples
        return fr.in_collective(samples[0].frames, self.words) if samples else None

    def shows(self, lane: LaneImage, wanted: Callable[[Frame], bool]) -> bool:
        """One of the eight innermost frames of the lane's thread is such a frame."""
        return any(wanted(x) for s in self.thread(lane).samples for x in s.frames[:8])

    def seen_working(self, lane: LaneImage) -> bool:
        """At work in one of the looks, be it at the confirming one or at another."""
        looks = [lane, *self._elsewhen.get((lane.slot, lane.pid), ())]
        return any(x.phase.cls is LaneClass.WORK for x in looks if x.stack)

    def latest(self, lane: LaneImage) -> LaneImage:
        """The lane as the last look saw it; as it is here if that look did not."""
        after = self.case.after
        for other in after.image.lanes if after is not None and after.image else ():
            if (other.slot, other.pid, other.address) == (lane.slot, lane.pid, lane.address):
                return other
        return lane

    def turns(self, lane: LaneImage) -> bool:
        """A loop that moves and is no mere poll: seen at work, or a scheduler by its name."""
        if not self.moved(lane) or self.is_loop(lane):
            return False
        named = lane.name.lower() in self.words.scheduler_lanes
        return named or self.seen_working(lane) or lane.role.lower() in self.words.scheduler_roles

    def beats_between(self, lane: LaneImage) -> int:
        """At how many looks between the earliest and the latest one the lane had moved."""
        beats = [lane.beats, *(x.beats for x in self._elsewhen.get((lane.slot, lane.pid), ()))]
        return max(beats) - min(beats)

    def is_attached(self, pid: int) -> bool:
        """A process of the board, dead or alive."""
        facts = self.look.processes.get(pid)
        return self.member(pid, facts.start_ticks if facts else 0) is not None

    def name_of(self, pid: int) -> str:
        """'worker:0 (pid 12)', or 'pid 12 (python)'."""
        facts = self.look.processes.get(pid)
        member = self.member(pid, facts.start_ticks if facts else 0)
        if member is not None:
            return f"{member.address} (pid {pid})"
        return f"pid {pid} ({facts.comm})" if facts is not None and facts.comm else f"pid {pid}"

    def found(self, rule: Rule) -> Finding | None:
        """The first finding of a rule, the judged one before the others."""
        return next((f for f in (self.finding, *self.case.findings) if f.rule is rule), None)

    def process_at(self, address: str) -> ProcessImage | None:
        return self.processes.get(address.partition("/")[0])

    def member(self, pid: int, ticks: int = 0) -> ProcessImage | None:
        """The attached process with this identity, dead or alive; ticks 0: any."""
        image = self.look.image
        remembered = self.case.snapshot.recall.attached.get(pid)
        known = (*(image.processes if image else ()), *([remembered] if remembered else ()))
        return next((p for p in known if p.pid == pid and ticks in (0, p.start_ticks)), None)

    def _edges(self) -> tuple[Edge, ...]:
        half = self.finding.elapsed_ns / 2e9
        stuck = {
            a
            for a, lane in self.lanes.items()
            if self.stuck(lane) and (self.late(a) is not None or self.age_s(lane) >= half)
        }
        declared = graph.edges(self.look, stuck)
        unspoken = dict(self.words.implicit_waits)
        image = self.look.image
        extra = [
            Edge(address, target, lane.phase.name)
            for address, lane in self.lanes.items()
            if not lane.wait_on and (spec := unspoken.get(lane.phase.name.lower()))
            for target in graph.targets(spec, image, self.lanes)
            if target in self.lanes and target != address
        ]
        return (*declared, *extra)


def _with_board(case: Case) -> Snapshot:
    """The look that confirmed; if its board could not be read, the nearest look that has one."""
    if case.snapshot.image is not None:
        return case.snapshot
    image: BoardImage | None = case.before.image
    if image is None and case.after is not None:
        image = case.after.image
    return replace(case.snapshot, image=image)


def _elsewhen(case: Case) -> dict[tuple[int, int], list[LaneImage]]:
    """The lanes of the other looks, by slot and pid."""
    out: dict[tuple[int, int], list[LaneImage]] = {}
    for look in (case.before, case.after):
        for lane in look.image.lanes if look is not None and look.image else ():
            out.setdefault((lane.slot, lane.pid), []).append(lane)
    return out


def _processes(look: Snapshot, whom: int = 0) -> dict[str, ProcessImage]:
    """Attached processes by address. A living one wins over a dead one's leftover, `whom` over all."""
    out: dict[str, ProcessImage] = {}
    for process in look.image.processes if look.image else ():
        known = out.get(process.address)
        alive = graph.is_alive(look, process.pid, process.start_ticks)
        if known is None or (alive and (process.pid == whom or known.pid != whom)):
            out[process.address] = process
    return out
