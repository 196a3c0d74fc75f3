"""The thread that lives one engine's life: events in, `machine.step`, orders carried out.

May live here: the queue, the timers, starting of jobs. May not: decisions (they are in
lifecycle.machine), evidence (daemon.case), anything that blocks for longer than a look. What takes
time (spawn, kill, stop, collection) runs in a job of its own and answers with an event.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import replace

from stallwatch.clock import nanoseconds, seconds
from stallwatch.config import EngineConfig
from stallwatch.daemon.case import FINAL, MORE_S, StallCase
from stallwatch.daemon.incarnation import Incarnation
from stallwatch.daemon.learning import Learning
from stallwatch.daemon.orders import Orders
from stallwatch.daemon.parts import Parts
from stallwatch.daemon.persist import EngineMemory
from stallwatch.lifecycle.budget import Budget, Pace
from stallwatch.lifecycle.engine import Enforce, EngineState
from stallwatch.lifecycle.events import Event, EventKind
from stallwatch.lifecycle.machine import step
from stallwatch.lifecycle.states import State
from stallwatch.watch import limits
from stallwatch.watch.finding import Finding
from stallwatch.watch.notice import Confirmed, Debugged, Extended, JudgeFault, Notice, Warned
from stallwatch.watch.policy import Policy
from stallwatch.watch.tracker import moved

TICK_S = 0.1
_QUEUE = 1024
_PARKED = 16
_SERVING = frozenset({State.STARTING, State.READY})
_SETTLED = frozenset(State) - {State.SUSPECT, State.STALLED, State.FAILED}
_FOLLOWING = _SERVING | {State.DRAINING, State.STOPPING}


class Runner:
    """One engine. Every public method is safe from any thread and returns at once."""

    def __init__(self, name: str, config: EngineConfig, parts: Parts) -> None:
        self.name = name
        self.config = config
        self.parts = parts
        policy = limits.build(config.limits, where=f"[engines.{name}.limits]")
        self._learning = Learning(parts.state_dir, name, config.limits, self.problem)
        self._base_policy: Policy = self._learning.policy(policy)
        self.policy = self._base_policy
        self._lease_until = 0
        self._lease_ns = 0
        self.turned_ns = parts.clock.monotonic_ns()
        self.survivors: dict[int, int] = {}  # of an earlier daemon's tree: pid -> start ticks
        self._memory = EngineMemory(parts.state_dir, name, parts.clock, self.problem)
        budget, number = self._memory.load(Budget(pace=_pace(config), seed=parts.seed))
        self.state = EngineState(
            budget=budget,
            incarnation=number,
            enforce=config.enforce,
            policy=config.restart.policy,
            since_ns=self.turned_ns,
        )
        self.orders = Orders(self)
        self.orders.last_stall = _last_told(parts, name)
        self._parked: dict[str, Confirmed] = {}  # confirmed while another case was followed
        self._events: queue.Queue[Event | Notice | Callable[[], None]] = queue.Queue(_QUEUE)
        self._ready_since: int | None = None
        self._ending = threading.Event()
        self._served = False
        self._swept: Incarnation | None = None
        self.ended = threading.Event()  # set when the thread has gone
        self._thread = threading.Thread(target=self._run, name=f"stallwatch-{name}", daemon=True)

    # -- from other threads --------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()
        self.post(Event(EventKind.START_ASKED, text="start asked for"))

    def post(self, item: Event | Notice | Callable[[], None]) -> None:
        """Queue one event. A full queue (1024 undone events) is a fault and is told, not waited for."""
        try:
            self._events.put_nowait(item)
        except queue.Full:
            self.problem("the runner's queue is full: an event was lost")

    @property
    def incarnation(self) -> Incarnation | None:
        """The present start of the engine, or the last one; None before the first."""
        return self.orders.incarnation

    @property
    def last_stall(self) -> str:
        """The id of the latest declared stall, or ''."""
        return self.orders.last_stall

    @property
    def top_frame(self) -> str:
        """The culprit's frame of the case at hand, or ''."""
        case = self.orders.case
        return case.verdict.culprit.frame if case is not None and case.verdict is not None else ""

    def pause(self, seconds_: float) -> None:
        """A lease: limits are higher by its length until it ends. A second one replaces the first."""

        def begin() -> None:
            self._lease_until = self.parts.clock.monotonic_ns() + nanoseconds(seconds_)
            self._lease_ns = nanoseconds(seconds_)
            self.policy = _raised(self._base_policy, self._lease_ns)

        self.post(begin)

    def hurry(self) -> None:
        """A second signal: no more drain and no more grace."""
        self.orders.kill_now()

    def end(self) -> None:
        """Let the thread go once the engine is down. Stop the engine first."""
        self._ending.set()
        self.post(lambda: None)

    def join(self, timeout_s: float) -> bool:
        if self._thread.ident is None:
            return True  # never started: the daemon failed before
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def reload(self, config: EngineConfig) -> None:
        """Limits and policies of a re-read configuration; nothing else may differ."""
        policy = limits.build(config.limits, where=f"[engines.{self.name}.limits]")

        def swap() -> None:
            self._learning = Learning(self.parts.state_dir, self.name, config.limits, self.problem)
            self.config, self._base_policy = config, self._learning.policy(policy)
            # A pause under way is a promise: the new limits are raised by it as the old ones were.
            self._set_policy()
            self.state = replace(
                self.state,
                enforce=self._enforce_now(config),
                policy=config.restart.policy,
                budget=replace(self.state.budget, pace=_pace(config)),
            )

        self.post(swap)

    def _set_policy(self) -> None:
        base = self._base_policy
        self.policy = _raised(base, self._lease_ns) if self._lease_until else base

    def _learn(self) -> None:
        """Limits from what phases usually take, while the engine serves and nothing is suspected."""
        known = self.incarnation
        if self._learning.turn(
            known.latest() if known is not None else None,
            serving=self.state.state is State.READY,
            compile_steps=self.policy.compile_steps,
            raised=self.policy.raised_ns > 0,
        ):
            self._base_policy = self._learning.policy(self._base_policy)
            self._set_policy()

    def _enforce_now(self, config: EngineConfig) -> Enforce:
        """A stall at hand is ended by the rule it began with; the new one holds from then on."""
        if self.state.state in _SETTLED:
            return config.enforce
        self.parts.events.emit(
            self.name, "reloaded", f"enforce = {config.enforce} holds once this stall is over"
        )
        return self.state.enforce

    # -- the loop ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not (self._ending.is_set() and self._down() and self._events.empty()):
                self._turn()
        finally:
            if self.incarnation is not None:
                self.incarnation.close()
            self.ended.set()

    def _down(self) -> bool:
        """No tree, and none on its way: a spawn that is under way must be answered, then ended."""
        return not (self.state.up or self.state.spawning)

    def _turn(self) -> None:
        try:
            item = self._events.get(timeout=TICK_S)
        except queue.Empty:
            item = None
        try:
            if item is not None:
                self._handle(item)
            self._tick()
        except Exception as error:
            # The runner is the only one who can end this tree: it goes on whatever happens.
            self.problem(f"the runner failed at {item!r}: {error!r}")
        self.turned_ns = self.parts.clock.monotonic_ns()

    def _handle(self, item: Event | Notice | Callable[[], None]) -> None:
        if isinstance(item, Event):
            self._step(item)
        elif isinstance(item, Warned | Confirmed | Extended | Debugged | JudgeFault):
            self._notice(item)
        else:
            item()

    def _step(self, event: Event) -> None:
        if event.kind is EventKind.RESTART_ASKED:
            self.parts.totals.add("restarts", self.name, "operator")
        if event.kind is EventKind.WITHDRAWN:
            self.parts.totals.add("withdrawn", self.name)
            if self.orders.case is not None:
                self.parts.judge.rearm(self.name, self.orders.case.confirmed.finding.key)
            self.parts.events.emit(self.name, "withdrawn", event.text)
        self.state, actions = step(self.state, event, self.parts.clock.monotonic_ns())
        for action in actions:
            try:
                self.orders.carry_out(action, event)
            except Exception as error:
                # One order that fails must not take the next ones with it: a kill may be among them.
                self.problem(f"the order {action.do} failed: {error!r}")

    def _tick(self) -> None:
        now = self.parts.clock.monotonic_ns()
        if self.incarnation is not None:
            self.incarnation.tick()
            self._sweep_gone()
            self._note_recovered()
            self._note_served()
            self._learn()
        self.orders.retry()
        if self._parked:
            self._follow_parked()
        if self.state.enforce != self.config.enforce and self.state.state in _SETTLED:
            self.state = replace(self.state, enforce=self.config.enforce)
        if self._lease_until and now >= self._lease_until:
            self._lease_until, self.policy = 0, self._base_policy
            self.parts.events.emit(self.name, "paused", "the pause is over: limits as before")
        if self.orders.backoff_at is not None and now >= self.orders.backoff_at:
            self.orders.backoff_at = None
            self.parts.totals.add("restarts", self.name, self._why_down())
            self._step(Event(EventKind.BACKOFF_OVER))
        if self.state.state is not State.READY:
            self._ready_since = None
        elif self._ready_since is None:
            self._ready_since = now
        elif now - self._ready_since > nanoseconds(self.config.restart.healthy_after):
            self._ready_since = now
            self._step(Event(EventKind.HEALTHY))

    def _why_down(self) -> str:
        """The kind that ended the last incarnation; 'preflight' when none began."""
        case = self.orders.case
        if self.state.preflight_tries or case is None or case.verdict is None:
            return "preflight"
        return str(case.verdict.kind)

    def _sweep_gone(self) -> None:
        """Nothing of the tree lives and no job is at it: say so (an observed engine that ended)."""
        known = self.incarnation
        if known is None or known is self._swept or self.orders.busy() or known.members():
            return
        if self.state.up and self.state.enforce == "observe" and self.state.state is State.STALLED:
            self._swept = known
            words, case = "the whole tree ended", self.orders.case
            self.orders.job(
                "sweep", lambda: self.orders.after_end(known, gone=True, words=words, case=case)
            )

    def _note_recovered(self) -> None:
        """Only observed is there a way back: after a FAILURE the clients have been told."""
        case, known = self.orders.case, self.incarnation
        if self.state.state is not State.STALLED or self.state.enforce != "observe":
            return
        if case is None or case.failure is None or known is None:
            return
        finding, snapshot = case.confirmed.finding, known.latest()
        if snapshot is None or snapshot.now_ns <= case.declared_ns or finding.rule in FINAL:
            return
        if moved(finding, snapshot):
            text = "it moves again"
            self._step(Event(EventKind.RECOVERED, text=text))
            self.orders.job("recovered", lambda: self._close_recovered(case, text))

    def _close_recovered(self, case: StallCase, text: str) -> None:
        case.done.wait(MORE_S)  # two writers of one report: the later one must know more
        case.closing(text)

    def _note_served(self) -> None:
        if not self._served and self.incarnation is not None and self.incarnation.served():
            self._served = True
            self._step(Event(EventKind.SERVED))

    # -- what the judge says -------------------------------------------------------------------

    def _notice(self, notice: Notice) -> None:
        emit = self.parts.events.emit
        if isinstance(notice, Confirmed):
            self._confirmed(notice)
        elif isinstance(notice, Warned):
            f = notice.finding
            if self.state.doomed:
                return
            emit(self.name, "warn", _warning(f), key=f.key)
            if self.incarnation is not None and self.incarnation.may_sample(f.limit_ns):
                known, snapshot = self.incarnation, notice.snapshot
                self.orders.job("sample", lambda: known.sample(snapshot))
        elif isinstance(notice, Extended):
            self.parts.totals.add("extensions", self.name)
            text = f"a limit was extended by {seconds(notice.by_ns):.1f} s: {notice.witness}"
            emit(self.name, "extended", text, key=notice.finding.key)
        elif isinstance(notice, Debugged):
            text = f"pid {notice.pid} is traced by pid {notice.tracer_pid}: " + (
                "for half an hour now, limits run again"
                if notice.expired
                else "limits are suspended"
            )
            emit(self.name, "debugger", text)
        else:
            emit(self.name, "fault", notice.text)

    def _confirmed(self, notice: Confirmed) -> None:
        known = self.incarnation
        if known is None or notice.snapshot.engine.incarnation != known.number:
            return
        f = notice.finding
        case = self.orders.case
        if self.state.state not in _FOLLOWING or (case is not None and not case.decided.is_set()):
            # One case at a time. The judge tells each stretch once: keep it for afterwards.
            if len(self._parked) < _PARKED:
                self._parked[f.key] = notice
            return
        self.orders.finding = notice
        text = f"{f.rule}: {f.subject.lane or f.subject.process or 'the engine'}"
        self._step(Event(EventKind.SUSPECTED, text=text))

    def _follow_parked(self) -> None:
        """The case at hand led to nothing (it moved, an alert): is another stall still there?"""
        known, case, parked = self.incarnation, self.orders.case, self._parked
        if self.state.state not in _SERVING or (case is not None and not case.decided.is_set()):
            return
        _, notice = parked.popitem()
        snapshot = known.latest() if known is not None else None
        if snapshot is not None and not moved(notice.finding, snapshot):
            self._confirmed(notice)
        else:
            self.parts.judge.rearm(self.name, notice.finding.key)

    def fresh_start(self) -> None:
        """A new incarnation is about to be made: nothing said of the old one counts."""
        self._served = False
        self._parked = {}  # replaced, not emptied: this is the spawning job's thread

    def save(self) -> None:
        """Budget and incarnation number, for the next daemon."""
        self._memory.save(self.state.budget, self.state.incarnation)

    def problem(self, text: str) -> None:
        self.parts.events.emit(self.name, "fault", text)


def _last_told(parts: Parts, name: str) -> str:
    """The latest stall that an earlier daemon told of this engine: the ledger outlives daemons."""
    return next((str(each["id"]) for each in parts.ledger.summaries(1, name)), "")


def _warning(finding: Finding) -> str:
    """Who may be late. A stopped process is named at the first look, before half of its limit."""
    who = finding.subject.lane or finding.subject.process or "the engine"
    what = (
        f"{who} in {finding.subject.phase or finding.rule} for "
        f"{seconds(finding.elapsed_ns):.1f} s of {seconds(finding.limit_ns):.1f} s"
    )
    half = 2 * finding.elapsed_ns >= finding.limit_ns
    return f"half of a limit is over: {what}" if half else f"seen: {what}"


def _raised(base: Policy, more: int) -> Policy:
    """Every limit higher by `more` ns."""
    return replace(
        base,
        raised_ns=more,
        no_progress_ns=base.no_progress_ns + more,
        start_silence_ns=base.start_silence_ns + more,
    )


def _pace(config: EngineConfig) -> Pace:
    r = config.restart
    return Pace(
        limit=r.budget,
        window_ns=nanoseconds(r.window),
        delays_ns=tuple(nanoseconds(s) for s in r.backoff),
        cap_ns=nanoseconds(r.backoff_cap),
    )
