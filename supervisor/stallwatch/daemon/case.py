"""One stall, from a confirmed finding to the final report. Runs in a thread of its own.

The order is fixed: first stacks (at most 1 s), third look, verdict, FAILURE; then the rest of the
evidence while clients are being answered. Nothing here kills or restarts: it only answers the
runner with events.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from stallwatch.board.image import ProcessImage
from stallwatch.clock import Clock, seconds
from stallwatch.diagnosis.ask import question
from stallwatch.diagnosis.classify import diagnose, refine
from stallwatch.diagnosis.kinds import Action, Kind
from stallwatch.diagnosis.verdict import Case, Culprit, Verdict
from stallwatch.evidence import deeds
from stallwatch.evidence.ladder import Ladder
from stallwatch.evidence.ledger import Ledger
from stallwatch.evidence.model import ProcessEvidence, Target
from stallwatch.evidence.redact import Redactor
from stallwatch.evidence.report import Context, artefacts, build_report
from stallwatch.heartbeat.failure import Failure
from stallwatch.lifecycle.events import Event, EventKind
from stallwatch.watch.finding import Finding, Rule
from stallwatch.watch.notice import Confirmed
from stallwatch.watch.objects import find
from stallwatch.watch.snapshot import Snapshot
from stallwatch.watch.tracker import moved

FIRST_S = 1.0
MORE_S = 15.0
ANSWER_WAIT_S = 3.0
GATEWAY_S = 0.5  # a gateway tells so soon how many clients it answered
FINAL = frozenset({Rule.PROCESS_GONE, Rule.THREAD_GONE})  # these cannot un-happen
_LOG_LINES = 200
FRONT_ENDS = frozenset({"api", "engine"})


class Patient(Protocol):
    """What a case needs of its engine. Every method returns at once, `look` within a second."""

    name: str
    incarnation: int
    command: Sequence[str]
    redactor: Redactor
    ladder: Ladder
    half: tuple[int, Mapping[int, ProcessEvidence]]  # when, and the stacks at half of a limit
    caches: Sequence[str]  # folders in which compilers of this engine keep their lock files

    @property
    def waits_for(self) -> str:
        """What READY still needs, '' once it is."""
        ...

    def targets(self, snapshot: Snapshot) -> list[Target]: ...
    def log_tail(self, lines: int) -> Sequence[str]: ...
    def look(self, suspects: frozenset[int]) -> Snapshot | None: ...
    def held(self) -> int: ...
    def told(self, failure_id: str, since_ns: int) -> int: ...
    def latest(self) -> Snapshot | None: ...


@dataclass(slots=True)
class StallCase:
    """The case. `begin` answers WITHDRAWN or DECLARED; `finish` answers EVIDENCE_DONE, always."""

    patient: Patient
    confirmed: Confirmed
    clock: Clock
    ledger: Ledger
    post: Callable[[Event], None]
    failure: Failure | None = None
    verdict: Verdict | None = None
    declared_ns: int = 0
    answered_ns: int = 0
    decided: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    problem: Callable[[str], None] = lambda _text: None
    captured: Callable[[Mapping[int, ProcessEvidence]], None] = lambda _sets: None
    answered: Callable[[float], None] = lambda _s: None
    settled: Callable[[Verdict, float], None] = lambda _v, _s: None  # once, at its end
    repeated: Callable[[Verdict, str], str] = lambda _v, _id: ""  # the words, if it was told before
    _case: Case | None = None
    _targets: list[Target] = field(default_factory=list)
    _timeline: list[tuple[int, str]] = field(default_factory=list)
    _detected: float = 0.0
    _gpu: dict[str, Any] = field(default_factory=dict)
    _action: str = ""
    _settled: bool = False
    _written: bool = False
    _keeping: threading.Lock = field(default_factory=threading.Lock)
    _half: tuple[int, Mapping[int, ProcessEvidence]] = (0, {})
    _held: int = 0  # requests at gateways when it was confirmed

    def begin(self) -> None:
        """First stacks, third look, verdict. Whatever fails in here, the runner gets an answer."""
        self._detected = self.clock.wall()
        try:
            self._begin()
        except Exception as error:
            # Evidence must never stand between a stall and its FAILURE.
            self.problem(f"the case failed before its verdict: {error!r}")
            self._declare(self._bare_verdict())
        finally:
            self.decided.set()

    def _begin(self) -> None:
        finding, snapshot = self.confirmed.finding, self.confirmed.snapshot
        self._held = self.patient.held()
        self._note(f"confirmed: {finding.rule}, two looks agree", at_ns=snapshot.now_ns)
        self._half = self.patient.half if self.patient.half[0] >= finding.since_ns else (0, {})
        if self._half[0]:
            self._note(f"half of the limit: {_words(self._half[1], finding)}", at_ns=self._half[0])
        if self.patient.waits_for:
            self._note(f"READY waited for {self.patient.waits_for}", at_ns=snapshot.now_ns)
        self._targets = self.patient.targets(snapshot)
        stacks = self.patient.ladder.first(self._targets, deadline_s=FIRST_S)
        self.captured(stacks)
        self._note(f"first stacks of {len(stacks)} processes")
        third = self.patient.look(frozenset(stacks))
        if third is not None and finding.rule not in FINAL and moved(finding, third):
            self.post(Event(EventKind.WITHDRAWN, text="it moved at the third look"))
            return
        self._case = Case(
            finding=finding,
            findings=self.confirmed.findings,
            before=self.confirmed.before,
            snapshot=snapshot,
            stacks=stacks,
            after=third,
            log_tail=tuple(self.patient.log_tail(_LOG_LINES)),
        )
        asked = question(self._case, self.patient.caches)
        self._case = replace(self._case, objects=find(asked))
        self._declare(diagnose(self._case))

    def _bare_verdict(self) -> Verdict:
        """Without diagnosis, which may be what failed: the finding's own words, no kind."""
        finding = self.confirmed.finding
        self._case = self._case or Case(
            finding=finding,
            findings=self.confirmed.findings,
            before=self.confirmed.before,
            snapshot=self.confirmed.snapshot,
        )
        s = finding.subject
        who = s.lane or s.process or "the engine"
        return Verdict(
            kind=Kind.UNKNOWN_STALL,
            culprit=Culprit(s.process, s.role, s.rank, s.pid, s.lane, phase=s.phase),
            confidence="low",
            summary=f"{who} is late ({finding.rule}), and its evidence could not be read.",
        )

    def _declare(self, verdict: Verdict) -> None:
        finding = self.confirmed.finding
        self.verdict = verdict
        self.failure = Failure(
            id=self.ledger.new_id(self.clock.wall()),
            engine=self.patient.name,
            incarnation=self.patient.incarnation,
            kind=str(verdict.kind),
            culprit=verdict.culprit.address,
            phase=self.patient.redactor.redact(verdict.culprit.phase or finding.subject.phase),
            elapsed_s=seconds(finding.elapsed_ns),
            limit_s=seconds(finding.limit_ns),
            action="",
        )
        self.post(
            Event(
                EventKind.DECLARED,
                text=verdict.summary,
                stall=verdict.kind,
                failure_id=self.failure.id,
            )
        )

    def declared(self, action: str) -> None:
        """The runner has told the engine."""
        self.declared_ns = self.clock.monotonic_ns()
        self._action = action
        if self.failure is not None:
            self.failure = self.failure._replace(action=action)
        self._note(f"declared, action: {action}")

    def keep_first(self) -> None:
        """A job: the report as it is known now. The disk may hang; the kill does not wait for it."""
        try:
            self._keep(first=True)
        except Exception as error:
            self.problem(f"the first report was not kept: {error!r}")

    def finish(self, *, wait_answers: bool, more: bool = True) -> None:
        """The rest of the evidence, then EVIDENCE_DONE, whatever happens.

        more False: the engine serves on, and nothing of it may be held up for a better look.
        """
        try:
            watcher = threading.Thread(target=self._await_answers, daemon=True)
            if wait_answers:
                watcher.start()
            if more:
                self._more()
            if wait_answers:
                self._note_gateways()
                watcher.join(ANSWER_WAIT_S)
            self._settle()
            self._keep(first=False)
        except Exception as error:
            self.problem(f"the rest of the evidence was not kept: {error!r}")
        finally:
            self._settle()
            self.post(Event(EventKind.EVIDENCE_DONE))
            self.done.set()

    def closing(self, text: str) -> None:
        """Add how it went on, after the kill or the recovery."""
        self._note(text)
        try:
            self._keep(first=False)
        except Exception as error:
            self.problem(f"the report was not completed: {error!r}")

    def ended(self, words: str, *, gone: bool) -> None:
        """How its tree ended. A survivor of SIGKILL is named beside the kind that was told."""
        if not gone and self.verdict is not None:
            kinds = dict.fromkeys((*(self.verdict.kinds or (self.verdict.kind,)), Kind.UNKILLABLE))
            self.verdict = replace(
                self.verdict, kinds=tuple(kinds), reasons=(*self.verdict.reasons, words)
            )
            if self.failure is not None:  # nothing is started beside a process that lives
                self.failure = self.failure._replace(action=str(Action.FAIL))
        self.closing(f"tree gone: {words}" if gone else words)

    def _settle(self) -> None:
        """The kind is final: metrics count it now, so that they agree with the ledger."""
        if not self._settled and self.verdict is not None and self.failure is not None:
            self._settled = True
            if again := self.repeated(self.verdict, self.failure.id):
                self._note(again)
            finding = self.confirmed.finding
            late_ns = max(0, finding.elapsed_ns - finding.limit_ns)
            self.settled(self.verdict, seconds(late_ns))

    def _more(self) -> None:
        case = self._case
        if case is None:
            return
        gone = self.confirmed.finding.rule is Rule.PROCESS_GONE
        later = self.patient.ladder.more(
            self._targets, case.stacks, deadline_s=MORE_S, samples=0 if gone else 2, native=not gone
        )
        for found in later:
            self.captured(found)
        self._note(f"{deeds.FURTHER}: {len(later)} of every process")
        self._gpu = self.patient.ladder.gpu(deadline_s=2.0)
        after = self.patient.look(frozenset(case.stacks)) or case.after
        self._case = replace(
            case,
            later=tuple(later),
            after=after,
            log_tail=tuple(self.patient.log_tail(_LOG_LINES)),
            gpu=self._gpu,
        )
        if self.verdict is not None:
            self.verdict = refine(self.verdict, diagnose(self._case))

    def _await_answers(self) -> None:
        """Watch the front end's pending gauge fall to zero: the clients have their FAILURE."""
        held = self.confirmed.snapshot
        if abandoned(held):
            self._note("the front end is gone: the connections of those who waited were closed")
            return
        if not waiting(held):
            if not self._held:  # at a gateway either
                self._note("no client was waiting")  # and no latency is counted for nobody
            return
        until = time.monotonic() + ANSWER_WAIT_S
        while time.monotonic() < until:
            snapshot = self.patient.latest()
            if (
                snapshot is not None
                and snapshot.now_ns > self.declared_ns
                and not waiting(snapshot)
            ):
                self.answered_ns = snapshot.now_ns
                took = seconds(self.answered_ns - self.confirmed.snapshot.now_ns)
                self._note(f"every waiting client answered {took:.2f} s after confirmation")
                self.answered(took)
                return
            self.done.wait(0.02)
        self._note("some clients could not be answered by the engine; the kill closes them")

    def _note_gateways(self) -> None:
        """What gateways say of their clients: they answer when nobody in the engine can."""
        if self.failure is None:
            return
        id_, until = self.failure.id, time.monotonic() + (GATEWAY_S if self._held else 0.0)
        while not (told := self.patient.told(id_, self.declared_ns)) and time.monotonic() < until:
            self.done.wait(0.02)
        if told or self._held:
            self._note(deeds.gateway_words(self._held, told))

    def _note(self, text: str, *, at_ns: int | None = None) -> None:
        self._timeline.append((at_ns or self.clock.monotonic_ns(), text))

    def _keep(self, *, first: bool) -> None:
        with self._keeping:  # the later report knows more: they must not pass each other
            self._write(first=first and not self._written)
            self._written = True

    def _write(self, *, first: bool) -> None:
        if self.failure is None or self.verdict is None or self._case is None:
            return
        zero = self.confirmed.snapshot.now_ns
        context = Context(
            detected_at=self._detected,
            command=self.patient.command,
            redactor=self.patient.redactor,
            policy=self.confirmed.policy,
            gpu=self._gpu,
            timeline=[(seconds(at - zero), text) for at, text in sorted(self._timeline)],
        )
        report = build_report(self.failure, self.verdict, self._case, context)
        if first:
            trouble = self.ledger.insert(report)
        else:
            trouble = self.ledger.update(self.failure.id, report)
        if trouble:
            self.problem(trouble)
        if not first:
            for name, data in artefacts(self._case, self.patient.redactor).items():
                self.ledger.artefact(self.failure.id, name, data)
            if self._half[0]:
                case = replace(self._case, stacks=self._half[1], later=())
                half = artefacts(case, self.patient.redactor)
                self.ledger.artefact(self.failure.id, "stacks-at-half.json", half["stacks.json"])


def _words(found: Mapping[int, ProcessEvidence], finding: Finding) -> str:
    """Where the late thread was then, in a few words."""
    evidence = found.get(finding.subject.pid)
    for thread in evidence.threads if evidence else ():
        if thread.tid == finding.subject.tid and thread.frames:
            return f"{finding.subject.process} was in {thread.frames[0]}"
    return f"stacks of {len(found)} processes"


def front_ends(snapshot: Snapshot) -> list[ProcessImage]:
    """The living processes whose pending gauge counts clients.

    An engine whose roles are its own has no front end that we know: then all of them.
    """
    if snapshot.image is None:
        return []
    attached = [p for p in snapshot.image.processes if p.pid in snapshot.processes]
    return [p for p in attached if p.role in FRONT_ENDS] or attached


def abandoned(snapshot: Snapshot) -> bool:
    """Front ends that held requests have died, all of them: nobody is left to answer those."""
    processes = snapshot.image.processes if snapshot.image is not None else ()
    known = [p for p in processes if p.role in FRONT_ENDS and not p.detached]
    alive = any(p.pid in snapshot.processes for p in known)
    return not alive and any(p.pending for p in known)


def waiting(snapshot: Snapshot) -> int:
    """Requests that front ends still hold; 0 when no front end can be seen any more."""
    return sum(p.pending for p in front_ends(snapshot))
