"""Carrying out what the life table orders for one engine. What takes time is a job in a thread of
its own and answers with an event; nothing in here decides.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from stallwatch.clock import seconds
from stallwatch.config import GATEWAY
from stallwatch.daemon.case import StallCase
from stallwatch.daemon.gateway import farewell
from stallwatch.daemon.incarnation import Incarnation
from stallwatch.diagnosis.kinds import Action as Verdict
from stallwatch.diagnosis.kinds import Kind
from stallwatch.diagnosis.verdict import Verdict as Final
from stallwatch.errors import PreflightError, StallwatchError
from stallwatch.evidence.model import ProcessEvidence
from stallwatch.lifecycle.events import Action, Do, Event, EventKind
from stallwatch.lifecycle.repeats import Repeats, Seen
from stallwatch.lifecycle.states import State
from stallwatch.process.kill import KillLimits, kill
from stallwatch.process.members import Membership
from stallwatch.process.statefile import end_leftovers
from stallwatch.process.stop import StopResult, stop
from stallwatch.watch.notice import Confirmed

if TYPE_CHECKING:
    from stallwatch.daemon.runner import Runner

_GRACE_CASE_S = 1.5  # a stop that hangs gets its stacks within this
_AGAIN = KillLimits(pending_s=0.0, die_s=1.0, tracker_s=1.0)  # it had its ten seconds before
_DECIDED_S = 3.0  # a kill waits no longer for a verdict under way
_TELLING = frozenset({Verdict.FAIL, Verdict.RESTART})
_SPEAKING = {State.EXHAUSTED: "exhausted", State.UNKILLABLE: "unkillable"}
# What a job that broke down says in place of its answer: the tree may live.
_LOST_ANSWERS = {
    "kill": EventKind.KILL_SURVIVED,
    "stop": EventKind.KILL_SURVIVED,
    "drain": EventKind.GRACE_OVER,
    "spawn": EventKind.SPAWN_FAILED,
    "evidence": EventKind.EVIDENCE_DONE,
}


class Orders:
    """The hands of one runner. `carry_out` is called from the runner's thread only."""

    def __init__(self, runner: Runner) -> None:
        self.incarnation: Incarnation | None = None
        self.case: StallCase | None = None
        self.finding: Confirmed | None = None  # what the next COLLECT is about
        self.backoff_at: int | None = None
        self.last_stall = ""
        self._runner = runner
        self._parts = runner.parts
        self._name = runner.name
        self._jobs: set[threading.Thread] = set()
        self._jobs_lock = threading.Lock()
        self._undone: list[tuple[str, Callable[[], None]]] = []
        self._ending: Incarnation | None = None  # whose end is under way, or was the last one
        self._hurried: Incarnation | None = (
            None  # killed by a signal that came while it was stopped
        )
        self._grace_confirmed = threading.Event()
        self._reason_said = ""
        self._repeats = Repeats()

    def carry_out(self, action: Action, event: Event) -> None:
        """One order of the table; `event` is what led to it."""
        orders: dict[Do, Callable[[], None]] = {
            Do.PREFLIGHT_AND_SPAWN: lambda: self.job("spawn", self._spawn),
            Do.COLLECT: self._collect,
            Do.DECLARE: lambda: self._declare(action, event),
            Do.FINISH_EVIDENCE: self._finish,
            Do.KILL: lambda: self.job("kill", self._kill),
            Do.STOP: lambda: self.job("stop", self._stop),
            Do.DRAIN: lambda: self.job("drain", self._drain),
            Do.ARM_BACKOFF: lambda: self._arm(action.delay_ns),
            Do.CLEAR: self._clear,
            Do.SAVE_STATE: self._runner.save,
            Do.ANNOUNCE: lambda: self._announce(action.text),
        }
        orders[action.do]()

    # -- jobs ----------------------------------------------------------------------------------

    def job(self, what: str, work: Callable[[], None]) -> None:
        """Run it in a thread of its own. One that breaks down still answers the table."""

        def guarded() -> None:
            try:
                work()
            except Exception as error:
                text = f"the job {what!r} failed: {error!r}"
                self._runner.problem(text)
                if what in _LOST_ANSWERS:  # the machine waits for these
                    self._runner.post(Event(_LOST_ANSWERS[what], text=text, stall=Kind.UNKILLABLE))

        name = f"stallwatch-{self._name}-{what}"
        thread = threading.Thread(target=guarded, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # pids.max: the sick engine may share our cgroup
            self._runner.problem(f"the job {what!r} waits for a thread: {error}")
            self._undone.append((what, work))
            return
        with self._jobs_lock:  # a job may start a job
            self._jobs.add(thread)

    def retry(self) -> None:
        """Jobs that got no thread, once more. From the runner's tick."""
        undone, self._undone = self._undone, []
        for what, work in undone:
            self.job(what, work)

    def busy(self) -> bool:
        """Some job is under way."""
        with self._jobs_lock:
            self._jobs = {job for job in self._jobs if job.is_alive()}
            return bool(self._jobs)

    # -- at once -------------------------------------------------------------------------------

    def _arm(self, delay_ns: int) -> None:
        self.backoff_at = self._parts.clock.monotonic_ns() + delay_ns
        text = f"the next start is in {seconds(delay_ns):.1f} s"
        self._parts.events.emit(self._name, "backoff", text)

    def _announce(self, text: str) -> None:
        state = self._runner.state
        if state.reason and state.reason == self._reason_said:
            text = text.partition(":")[0]  # once is enough: it was said a line before
        # A new try that fails for the same reason is news again.
        self._reason_said = "" if state.state is State.STARTING else state.reason
        kind = _SPEAKING.get(state.state, "state")
        self._parts.events.emit(self._name, kind, text, state=str(state.state))
        self._parts.on_state(self._name, state.state)

    def _clear(self) -> None:
        self.backoff_at = None
        if self.incarnation is not None and self._runner.state.state is not State.FAILED:
            self.incarnation.clear()

    # -- a stall -------------------------------------------------------------------------------

    def _collect(self) -> None:
        known, finding, self.finding = self.incarnation, self.finding, None
        if known is None or finding is None:
            return

        def answer(event: Event) -> None:
            # An older case may end late: what it says is not about the incarnation or the stall
            # at hand, and its EVIDENCE_DONE would end the wait for another's evidence.
            if self.case is case:
                self._runner.post(event)

        totals, name = self._parts.totals, self._name
        case = StallCase(
            patient=known,
            confirmed=finding,
            clock=self._parts.clock,
            ledger=self._parts.ledger,
            post=answer,
            problem=self._runner.problem,
            captured=self._captured,
            answered=lambda took: totals.observe("answer", name, took),
            settled=self._count,
            repeated=self._told_before,
        )
        self.case = case
        self._grace_confirmed.set()
        self.job("case", case.begin)

    def _count(self, verdict: Final, late_s: float) -> None:
        """One more stall, and how late it was found. What was confirmed and came to nothing, or was
        found beside another stall, is in neither.
        """
        self._parts.totals.observe("detection", self._name, late_s)
        self._parts.totals.add("stalls", self._name, str(verdict.kind))

    def _told_before(self, verdict: Final, failure_id: str) -> str:
        """Count it if the same kind and culprit was told within a day, and say so. A case's thread."""
        now, kind, culprit = self._parts.clock.monotonic_ns(), str(verdict.kind), verdict.culprit
        before = self._repeats.before(kind, culprit.address, now)
        self._repeats = self._repeats.told(Seen(now, kind, culprit.address, failure_id))
        if not before:
            return ""
        self._parts.totals.add("repeated", self._name, kind)
        return (
            f"the same kind and culprit as {before[-1].id}, {len(before) + 1} times within a day: "
            "a restart does not cure it"
        )

    def _captured(self, found: Mapping[int, ProcessEvidence]) -> None:
        for evidence in found.values():
            self._parts.totals.add("captures", self._name, str(evidence.rung))

    def _declare(self, action: Action, event: Event) -> None:
        """Tell the engine first: its clients wait. Then the ledger, the metrics, the log."""
        case, known = self.case, self.incarnation
        if case is None or case.failure is None or case.failure.id != action.failure_id:
            return
        if action.action in _TELLING and known is not None:
            known.declare(case.failure._replace(action=str(action.action)))
        self.last_stall = case.failure.id
        case.declared(str(action.action))
        self.job("report", case.keep_first)
        self._parts.events.emit(
            self._name,
            "stall",
            f"{action.stall}: {event.text}",
            stall=case.failure.id,
            incarnation=case.failure.incarnation,
            kind=str(action.stall),
            culprit=case.failure.culprit,
            phase=case.failure.phase,
            elapsed_s=case.failure.elapsed_s,
            limit_s=case.failure.limit_s,
            action=str(action.action),
        )
        if action.action is Verdict.ALERT:
            self.job("evidence", lambda: case.finish(wait_answers=False, more=False))

    def _finish(self) -> None:
        case = self.case
        if case is None:
            self._runner.post(Event(EventKind.EVIDENCE_DONE))
            return
        waits = self._runner.state.enforce != "observe"
        self.job("evidence", lambda: case.finish(wait_answers=waits))

    # -- the tree: each answers with an event --------------------------------------------------

    def _spawn(self) -> None:
        before = self._survivors()
        if self.incarnation is not None:
            before |= dict(self.incarnation.membership.ever())
            self.incarnation.close()
            self.incarnation = None
        self.case = None
        self._grace_confirmed.clear()
        runner = self._runner
        runner.fresh_start()
        fresh = Incarnation(self._name, runner.state.incarnation, runner, before=before)
        try:
            fresh.start()
        except PreflightError as error:
            fresh.close()
            runner.post(Event(EventKind.PREFLIGHT_FAILED, text=str(error), retry=True))
        except StallwatchError as error:
            fresh.close()
            runner.post(Event(EventKind.SPAWN_FAILED, text=str(error)))
        except Exception as error:
            fresh.close()
            text = f"the start failed: {error!r}"
            runner.post(Event(EventKind.SPAWN_FAILED, text=text, retry=True))
        else:
            self.incarnation = fresh
            self._parts.judge.add(fresh)
            runner.post(Event(EventKind.SPAWNED, pid=fresh.root_pid))
            self.job("ready", fresh.await_ready)

    def _survivors(self) -> dict[int, int]:
        """What lives of an earlier daemon's tree. It is struck again, and buried once it is gone."""
        if self._runner.survivors:
            left = end_leftovers(
                str(self._parts.state_dir),
                reaper=self._parts.reaper,
                owned=self._parts.tools,
                limits=_AGAIN,
                engine=self._name,
            )
            self._runner.survivors = {p: t for each in left for p, t in each.survivors().items()}
        return dict(self._runner.survivors)

    def _kill(self) -> None:
        known, case = self.incarnation, self.case
        if known is None:
            self._runner.post(Event(EventKind.TREE_GONE))
            return
        if not self._begins_end(known):
            kill(known.membership)  # hastens the end under way, which answers for both
            return
        if case is not None:
            case.decided.wait(_DECIDED_S)
        result = kill(known.membership, pending=known.pending)
        self.after_end(known, gone=result.gone, words=result.words(), case=case)

    def _begins_end(self, known: Incarnation) -> bool:
        """One end for each incarnation: two would bury it twice, or bury its successor."""
        with self._jobs_lock:
            fresh = self._ending is not known
            self._ending = known
        return fresh

    def kill_now(self) -> None:
        """A second signal: no more drain, no more grace. The stop under way finds it done."""
        known = self.incarnation
        if known is not None and known.members():
            polite = self._name == GATEWAY and self._hurried is not known
            self._hurried = known
            end = farewell if polite else _kill_members
            self.job("hurry", lambda: end(known.membership))

    def _stop(self) -> None:
        known, config = self.incarnation, self._runner.config
        if known is None:
            self._runner.post(Event(EventKind.TREE_GONE))
            return
        if not self._begins_end(known):
            return
        known.stop_asked()
        self._grace_confirmed.clear()

        def drain() -> None:
            known.await_idle(config.drain)
            known.grace_begins(config.stop_grace)

        result = stop(
            known.membership,
            grace_s=config.stop_grace,
            drain=drain,
            before_kill=self._grace_over,
        )
        words = _stop_words(result, hurried=self._hurried is known)
        case = None if result.graceful else self.case
        self.after_end(known, gone=result.gone, words=words, case=case)

    def _grace_over(self) -> None:
        """The judge sees it too (SHUTDOWN_HANG): leave it the time for one set of stacks."""
        self._grace_confirmed.wait(_GRACE_CASE_S)
        if self.case is not None:
            self.case.decided.wait(_DECIDED_S)

    def _drain(self) -> None:
        known = self.incarnation
        done = known is None or known.await_idle(self._runner.config.drain)
        if self._runner.state.state is not State.DRAINING:
            return  # a stop took over, with a drain and a grace of its own
        self._runner.post(Event(EventKind.DRAINED if done else EventKind.GRACE_OVER))

    def after_end(
        self, known: Incarnation, *, gone: bool, words: str, case: StallCase | None
    ) -> None:
        """The tree ended, or would not: the report is completed, what it left is removed."""
        if not gone:
            with self._jobs_lock:
                self._ending = None  # an operator may try again
        self._parts.judge.remove(self._name)
        for ended in known.exits():
            if not ended.expected:
                self._parts.totals.add("exits", self._name)
        if case is not None and case.failure is not None:
            case.ended(words, gone=gone)
        self._parts.events.emit(self._name, "gone" if gone else "unkillable", words)
        if gone:
            known.bury()
        kind = EventKind.TREE_GONE if gone else EventKind.KILL_SURVIVED
        self._runner.post(Event(kind, text=words, stall=Kind.UNKILLABLE))


def _stop_words(result: StopResult, *, hurried: bool) -> str:
    """How a stop that was asked for ended, for people."""
    if not result.graceful:
        return f"grace over: {result.kill.words()}"
    return "it was killed at once: a signal asked for it" if hurried else "it stopped by itself"


def _kill_members(members: Membership) -> None:
    kill(members)
