"""What one process and its threads show, taken once from the case: states, CPU, GIL, frames."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from stallwatch.diagnosis import frames as fr
from stallwatch.diagnosis.verdict import Case
from stallwatch.diagnosis.vocabulary import Vocabulary
from stallwatch.evidence.model import Frame, ProcessEvidence, Rung, ThreadStack
from stallwatch.watch.snapshot import ProcFacts, Snapshot

MIN_WINDOW_S = 0.05  # shorter windows say nothing at 100 ticks per second
IDLE_SHARE = 0.05
_STACKED = (Rung.PYSPY, Rung.NATIVE)


@dataclass(frozen=True, slots=True)
class Cpu:
    """CPU used between two looks."""

    ticks: int
    seconds: float  # the ticks as time
    window_s: float

    @property
    def share(self) -> float:
        """Cores: 1.0 is one core all the time."""
        return self.seconds / self.window_s

    @property
    def idle(self) -> bool:
        """About nothing: one tick is the resolution, so one tick proves no work."""
        return self.ticks <= 1 or self.share < IDLE_SHARE


@dataclass(frozen=True, slots=True)
class Sample:
    """One thread in one set of stacks."""

    frames: tuple[Frame, ...]
    active: bool | None
    owns_gil: bool | None
    state: str
    native: bool

    @property
    def asleep(self) -> bool:
        """In the kernel, not running: by /proc when known, else as py-spy saw it."""
        if self.state:
            return self.state in "SD" and self.active is not True
        return self.active is False


@dataclass(frozen=True, slots=True)
class Thread:
    """One thread over all samples. `exists` None: the look did not list threads."""

    tid: int
    name: str = ""
    state: str = ""
    wchan: str = ""
    cpu: Cpu | None = None
    exists: bool | None = None
    samples: tuple[Sample, ...] = ()

    @property
    def label(self) -> str:
        return self.name or (f"thread {self.tid}" if self.tid else "")

    @property
    def asleep(self) -> bool:
        """S or D at every look that we have, at least one."""
        looks = [s.asleep for s in self.samples] + ([self.state in "SD"] if self.state else [])
        return bool(looks) and all(looks)

    @property
    def running(self) -> bool:
        """Runnable or running at every look, at least one."""
        looks = [s.state == "R" if s.state else s.active is True for s in self.samples]
        looks += [self.state == "R"] if self.state else []
        return bool(looks) and all(looks)

    @property
    def held_gil(self) -> bool:
        """It owned the GIL in every sample that could tell, at least one."""
        told = [s.owns_gil for s in self.samples if s.owns_gil is not None]
        return bool(told) and all(told)

    @property
    def touched_gil(self) -> bool:
        return any(s.owns_gil for s in self.samples)

    def same_function(self, words: Vocabulary) -> bool:
        """All samples block in the same function (one sample: trivially)."""
        tops = [fr.informative(s.frames, words) for s in self.samples]
        return bool(tops) and len({(f.name, f.filename) if f else None for f in tops}) == 1

    def frame(self, words: Vocabulary) -> Frame | None:
        """The function that blocks: the innermost that all samples share."""
        if not self.samples:
            return None
        if len(self.samples) > 1 and not self.same_function(words):
            shared = fr.common_function([s.frames for s in self.samples])
            if shared is not None:
                return shared
        return fr.informative(self.samples[0].frames, words)

    def waits_for(self, words: Vocabulary) -> str:
        """What it waits for by design, from frames of any sample or the kernel's wait channel."""
        for sample in self.samples:
            if what := fr.waits_by_design(sample.frames, words):
                return what
        return ""


@dataclass(frozen=True, slots=True)
class Process:
    """One process over all looks."""

    pid: int
    state: str = ""
    stopped_s: float = 0.0  # between the first and the last look in state T, untraced
    tracer_pid: int = 0
    cpu: Cpu | None = None
    threads: Mapping[int, Thread] = field(default_factory=dict)
    gil_known: bool = False
    tids: frozenset[int] | None = None  # at the last look that listed them

    def thread(self, tid: int) -> Thread:
        known = self.threads.get(tid)
        return known or Thread(tid, exists=None if self.tids is None else tid in self.tids)

    @property
    def sleeping_owner(self) -> Thread | None:
        """A thread that owns the GIL at every sample and is asleep at every look."""
        for thread in self.threads.values():
            if thread.held_gil and thread.asleep and (thread.cpu is None or thread.cpu.idle):
                return thread
        return None


def _sets(case: Case, pid: int, ticks: int) -> tuple[ProcessEvidence, ...]:
    """The evidence sets of one process, oldest first; of the process itself, not of a reused pid."""
    found = (s[pid] for s in (case.stacks, *case.later) if pid in s)
    return tuple(e for e in found if not ticks or e.target.start_ticks in (0, ticks))


def _looks(case: Case, pid: int, ticks: int) -> Iterator[tuple[Snapshot, ProcFacts]]:
    for look in (case.before, case.snapshot, case.after):
        facts = look.processes.get(pid) if look is not None else None
        if look is not None and facts is not None and (not ticks or facts.start_ticks == ticks):
            yield look, facts


def process_signals(case: Case, pid: int, ticks: int = 0) -> Process:
    """Everything the case knows of one process. Total: nothing known gives empty signals."""
    looks = list(_looks(case, pid, ticks))
    sets = _sets(case, pid, ticks)
    facts = _current(case, looks)
    stacks = [e for e in sets if e.rung in _STACKED and e.threads]
    points = [(look.now_ns, f.cpu_ticks) for look, f in looks]
    points += [(e.taken_ns, n) for e in sets if (n := _int(e.facts.get("cpu_ticks"))) is not None]
    listed = [f.tids for _, f in looks if f.tids is not None]
    tids = {t.tid for e in sets for t in e.threads} | {n for e in sets for n in e.thread_facts}
    tids |= {tid for _, f in looks for tid in f.thread_facts}
    return Process(
        pid=pid,
        state=facts.state if facts else _first_state(sets),
        stopped_s=_stopped_s(case, pid, looks),
        tracer_pid=facts.tracer_pid if facts else 0,
        cpu=_cpu(points, case),
        threads={tid: _thread(case, tid, looks, sets) for tid in sorted(tids)},
        gil_known=any(t.owns_gil is not None for e in stacks for t in e.threads),
        tids=listed[-1] if listed else None,
    )


def _first_state(sets: Sequence[ProcessEvidence]) -> str:
    return next((e.facts["state"][:1] for e in sets if e.facts.get("state")), "")


def _current(case: Case, looks: Sequence[tuple[Snapshot, ProcFacts]]) -> ProcFacts | None:
    """The facts of the look that confirmed; a later look only when that one has none."""
    for look, facts in looks:
        if look is case.snapshot:
            return facts
    return looks[-1][1] if looks else None


def _stopped_s(case: Case, pid: int, looks: Sequence[tuple[Snapshot, ProcFacts]]) -> float:
    since = case.snapshot.recall.stopped_since_ns.get(pid)
    if since is not None:
        return max(0, case.snapshot.now_ns - since) / 1e9
    times = [look.now_ns for look, f in looks if f.state == "T" and not f.tracer_pid]
    return (max(times) - min(times)) / 1e9 if times else 0.0


def _thread(
    case: Case,
    tid: int,
    looks: Sequence[tuple[Snapshot, ProcFacts]],
    sets: Sequence[ProcessEvidence],
) -> Thread:
    points = [(s.now_ns, f.thread_facts[tid].cpu_ticks) for s, f in looks if tid in f.thread_facts]
    samples: list[Sample] = []
    name = state = wchan = ""
    for evidence in sets:
        facts = evidence.thread_facts.get(tid, {})
        if (ticks := _int(facts.get("cpu_ticks"))) is not None:
            points.append((evidence.taken_ns, ticks))
        state, wchan = state or facts.get("state", "")[:1], wchan or facts.get("wchan", "")
        for stack in evidence.threads:
            if stack.tid == tid and stack.frames:
                samples.append(_sample(stack, evidence, facts.get("state", "")[:1]))
                name = name or stack.name
    for look, proc in looks:
        if look is case.snapshot and tid in proc.thread_facts:
            seen = proc.thread_facts[tid]
            state, wchan = seen.state, seen.wchan or wchan
    return Thread(tid, name, state, wchan, _cpu(points, case), _exists(looks, tid), tuple(samples))


def _sample(stack: ThreadStack, evidence: ProcessEvidence, state: str) -> Sample:
    gil = stack.owns_gil if evidence.rung in _STACKED else None
    return Sample(stack.frames, stack.active, gil, state, evidence.rung is Rung.NATIVE)


def _exists(looks: Sequence[tuple[Snapshot, ProcFacts]], tid: int) -> bool | None:
    told = [f.tids for _, f in looks if f.tids is not None]
    return tid in told[-1] if told else None


def _cpu(points: Sequence[tuple[int, int]], case: Case) -> Cpu | None:
    """CPU between the first and the last point inside the judged stretch, if they are far enough."""
    inside = sorted(p for p in points if p[0] >= case.finding.since_ns)
    for candidates in (inside, sorted(points)):
        if len(candidates) < 2:
            continue
        (t0, c0), (t1, c1) = candidates[0], candidates[-1]
        window = (t1 - t0) / 1e9
        if window >= MIN_WINDOW_S and c1 >= c0:
            return Cpu(c1 - c0, (c1 - c0) / max(case.clock_ticks, 1), window)
    return None


def _int(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 19 else None
