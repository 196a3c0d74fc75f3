"""Small builders for diagnosis cases: an engine of api:0, core:0 and worker:N, as vLLM has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from stallwatch.board.image import BoardImage, LaneClass, LaneImage, PhaseFrame, ProcessImage
from stallwatch.diagnosis.verdict import Case
from stallwatch.evidence.model import Frame, ProcessEvidence, Rung, Target, ThreadStack
from stallwatch.lifecycle.states import State
from stallwatch.watch.finding import Finding, Level, Rule, Subject
from stallwatch.watch.policy import S
from stallwatch.watch.snapshot import EngineFacts, Exit, ProcFacts, Snapshot, ThreadFacts

NOW = 1_000 * S
BEFORE = NOW - 30 * S
ENTERED = NOW - 61 * S


@dataclass
class Member:
    """One process of the engine under test. Its main thread's tid is its pid."""

    pid: int
    role: str
    rank: int = 0
    ppid: int = 1
    state: str = "S"
    cpu_share: float = 0.0  # of the whole process, between the looks
    threads: dict[int, tuple[str, float, str]] = field(default_factory=dict)  # state, share, wchan
    gone_tids: frozenset[int] = frozenset()
    stacks: tuple[ThreadStack, ...] = ()
    rung: Rung = Rung.PYSPY
    tracer_pid: int = 0
    pending: int = 0
    ready: bool = True
    attached: bool = True

    @property
    def ticks(self) -> int:
        return self.pid * 10


@dataclass
class Build:
    """Collects an engine, then makes the Case. Times are seconds unless they end in _ns."""

    members: list[Member] = field(default_factory=list)
    lanes: list[LaneImage] = field(default_factory=list)
    exits: list[Exit] = field(default_factory=list)
    dead: set[int] = field(default_factory=set)
    moved: set[str] = field(default_factory=set)
    ready: bool = True
    log_tail: tuple[str, ...] = ()
    later: int = 0  # how many further sets of the same stacks

    def member(self, pid: int, role: str, rank: int = 0, **more: object) -> Member:
        member = replace(Member(pid, role, rank), **more)  # type: ignore[arg-type]
        self.members.append(member)
        return member

    def lane(  # noqa: PLR0913 - a builder: keywords with defaults
        self,
        member: Member,
        name: str = "main",
        phase: str = "",
        *,
        cls: LaneClass | None = None,
        on: str = "",
        age: float = 61,
        tid: int = 0,
        work: int = 10,
        outer: PhaseFrame | None = None,
        channel: bool = False,
        moved: bool = False,
    ) -> LaneImage:
        """A lane; without a phase it idles. It has not moved since `age`, unless `moved`."""
        kind = cls if cls is not None else (LaneClass.WORK if phase else LaneClass.IDLE)
        at = NOW - int(age * S)
        inner = PhaseFrame(phase or "idle", kind, at, at, 0)
        lane = LaneImage(
            slot=len(self.lanes),
            pid=member.pid,
            tid=tid or member.pid,
            start_ticks=member.ticks,
            role=member.role,
            rank=member.rank,
            name=name,
            channel=channel,
            stack=(outer, inner) if outer is not None else (inner,),
            beats=100,
            work=work,
            wait_on=on,
        )
        self.lanes.append(lane)
        if moved:
            self.moved.add(lane.address)
        return lane

    def exit(self, member: Member, *, at_s: float = 0.0, **more: object) -> Exit:
        """The member ended; its lanes stay in the board as they were."""
        self.dead.add(member.pid)
        ended = Exit(member.pid, member.ticks, NOW - S + int(at_s * S), root=member.role == "api")
        self.exits.append(replace(ended, **more))  # type: ignore[arg-type]
        return self.exits[-1]

    def late(
        self, lane: LaneImage, *, rule: Rule = Rule.PHASE_OVER_LIMIT, limit: float = 60
    ) -> Finding:
        """The finding that this lane is over its limit."""
        since = lane.phase.progress_ns
        subject = Subject(
            process=f"{lane.role}:{lane.rank}",
            role=lane.role,
            rank=lane.rank,
            pid=lane.pid,
            start_ticks=lane.start_ticks,
            tid=lane.tid,
            lane=lane.address,
            phase=lane.phase.name,
        )
        return finding(rule, subject, elapsed_s=(NOW - since) / S, limit_s=limit)

    def case(self, judged: Finding, *others: Finding) -> Case:
        sets = {m.pid: _evidence(m, NOW) for m in self.members if m.pid not in self.dead}
        later = tuple(
            {m.pid: _evidence(m, NOW + (n + 1) * S) for m in self.members if m.pid not in self.dead}
            for n in range(self.later)
        )
        return Case(
            finding=judged,
            findings=(judged, *others),
            before=self._look(BEFORE, early=True),
            snapshot=self._look(NOW, early=False),
            stacks={pid: e for pid, e in sets.items() if e.threads},
            later=later,
            log_tail=self.log_tail,
        )

    def _look(self, now: int, *, early: bool) -> Snapshot:
        seconds = 0.0 if early else (NOW - BEFORE) / S
        lanes = [
            replace(x, beats=x.beats - 50) if early and x.address in self.moved else x
            for x in self.lanes
        ]
        attached = [m for m in self.members if m.attached]
        return Snapshot(
            now_ns=now,
            engine=EngineFacts(
                "chat",
                1,
                State.READY if self.ready else State.STARTING,
                ready_ns=NOW - 600 * S if self.ready else None,
            ),
            image=BoardImage(
                1,
                now,
                processes=tuple(
                    ProcessImage(
                        n, m.pid, m.ticks, m.role, m.rank, m.ready, m.pending, attached_ns=0
                    )
                    for n, m in enumerate(attached)
                ),
                lanes=tuple(lanes),
            ),
            processes={
                m.pid: _proc(m, seconds) for m in self.members if early or m.pid not in self.dead
            },
            exits=() if early else tuple(self.exits),
        )


def finding(
    rule: Rule, subject: Subject | None = None, *, elapsed_s: float = 61, limit_s: float = 60
) -> Finding:
    """A confirmed finding that began `elapsed_s` ago."""
    elapsed = int(elapsed_s * S)
    return Finding(
        rule=rule,
        level=Level.OVER,
        subject=subject or Subject(),
        since_ns=NOW - elapsed,
        elapsed_ns=elapsed,
        limit_ns=int(limit_s * S),
        key="key",
        fingerprint=(),
    )


def frames(*names: str) -> tuple[Frame, ...]:
    """Innermost first: 'run_kernel@model.py:42', or 'run_kernel' in model.py:42."""
    out = []
    for text in names:
        name, _, where = text.partition("@")
        file, _, line = (where or "model.py:42").rpartition(":")
        out.append(Frame(name, file, int(line)))
    return tuple(out)


def stack(
    tid: int,
    *names: str,
    name: str = "MainThread",
    active: bool | None = False,
    gil: bool | None = False,
) -> ThreadStack:
    return ThreadStack(tid, name, frames(*names), active, gil)


def thread_facts(member: Member, seconds: float) -> Mapping[int, ThreadFacts]:
    main = {member.pid: (member.state, member.cpu_share, "futex_do_wait")}
    return {
        tid: ThreadFacts(tid, state, 1000 + round(share * seconds * 100), wchan)
        for tid, (state, share, wchan) in (main | member.threads).items()
    }


def _proc(member: Member, seconds: float) -> ProcFacts:
    used = member.cpu_share or max((t[1] for t in member.threads.values()), default=0.0)
    threads = thread_facts(member, seconds)
    return ProcFacts(
        pid=member.pid,
        start_ticks=member.ticks,
        ppid=member.ppid,
        comm=member.role,
        state=member.state,
        cpu_ticks=5000 + round(used * seconds * 100),
        child_ticks=0,
        rss_pages=1000,
        threads=len(threads),
        tracer_pid=member.tracer_pid,
        tids=frozenset(set(threads) | _lane_tids(member)) - member.gone_tids,
        thread_facts=threads,
    )


def _lane_tids(member: Member) -> set[int]:
    return {member.pid, *(t.tid for t in member.stacks), *range(member.pid + 1, member.pid + 10)}


def _evidence(member: Member, now: int) -> ProcessEvidence:
    facts: dict[int, Mapping[str, str]] = {
        tid: {"state": t.state, "wchan": t.wchan} for tid, t in thread_facts(member, 0).items()
    }
    target = Target(member.pid, member.ticks, member.role, member.rank)
    stacks: Sequence[ThreadStack] = member.stacks
    return ProcessEvidence(
        target, member.rung, tuple(stacks), {"state": member.state}, facts, (), taken_ns=now
    )
