"""The daemon as the control plane sees it: read views, and questions to the runners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stallwatch.chaos import desk
from stallwatch.clock import seconds
from stallwatch.config.doors import door
from stallwatch.control.service import Counters, EngineView, Event, Liveness
from stallwatch.daemon import views
from stallwatch.daemon.events import rfc3339
from stallwatch.daemon.parts import Parts
from stallwatch.daemon.runner import Runner
from stallwatch.errors import StallwatchError, UnknownEngine
from stallwatch.evidence.ladder import Ladder
from stallwatch.evidence.redact import Redactor, redact_argv
from stallwatch.evidence.report import live
from stallwatch.lifecycle import events as life
from stallwatch.lifecycle.engine import EngineState
from stallwatch.lifecycle.states import SERVING, State

_JUDGE_LATE_S = 5.0
_RUNNER_LATE_S = 10.0
_SPAWN_LATE_S = 5.0
_TRIES = 3
_KEY_LINES = 200  # a private key that began before the lines asked for
_NOTHING_KNOWN = Redactor()


class DaemonService:
    """Implements control.service.Service over the runners of one daemon."""

    def __init__(self, parts: Parts, runners: Mapping[str, Runner]) -> None:
        self._parts = parts
        self._runners = runners

    # -- reading -------------------------------------------------------------------------------

    def engines(self) -> Sequence[EngineView]:
        return [self._view(runner) for runner in self._runners.values()]

    def engine(self, name: str) -> EngineView:
        return self._view(self._runner(name))

    def liveness(self) -> Liveness:
        now = self._parts.clock.monotonic_ns()
        ages = [("judge", self._parts.judge.age_s(), _JUDGE_LATE_S)]
        ages += [
            (f"runner {name}", seconds(now - r.turned_ns), _RUNNER_LATE_S)
            for name, r in self._runners.items()
            if not r.ended.is_set()
        ]
        late = [f"{name} has not turned for {age:.1f} s" for name, age, most in ages if age > most]
        loops = tuple((name, age) for name, age, _ in ages)
        kept = self._parts.ledger.memory_only
        return Liveness(live=not late, loops=loops, detail="; ".join(late), reports=kept)

    def counters(self) -> Counters:
        return self._parts.totals.read(
            looks=self._parts.judge.looks,
            late_looks=self._parts.judge.late_looks,
            log_dropped={
                name: r.incarnation.dropped if r.incarnation else 0
                for name, r in self._runners.items()
            },
        )

    def logs(self, name: str, *, lines: int = 100) -> Sequence[str]:
        known = self._runner(name).incarnation
        if known is None or lines < 1:
            return []
        return known.redactor.redact_lines(known.log_tail(lines + _KEY_LINES))[-lines:]

    def stalls(
        self, *, limit: int = 100, engine: str | None = None, offset: int = 0
    ) -> Sequence[dict[str, Any]]:
        return self._parts.ledger.summaries(limit, engine, offset=offset)

    def stall(self, stall_id: str) -> dict[str, Any]:
        report = self._parts.ledger.get(stall_id)
        if report is None:
            raise UnknownEngine(
                f"no stall {stall_id!r} in the ledger", hint="`stallwatch stalls` lists them"
            )
        return report

    def artefacts(self, stall_id: str) -> Sequence[str]:
        return [str(path) for path in self._parts.ledger.artefacts(stall_id)]

    def events(self, *, after: int = 0, limit: int = 1000) -> Sequence[Event]:
        return self._parts.events.after(after, limit)

    def wait_events(self, after: int, timeout_s: float) -> Sequence[Event]:
        return self._parts.events.wait(after, timeout_s)

    # -- asking --------------------------------------------------------------------------------

    def restart(self, name: str, *, who: str) -> str:
        runner = self._runner(name)
        text = f"restart asked for by {who}"
        self._parts.events.emit(name, "asked", text)
        runner.post(life.Event(life.EventKind.RESTART_ASKED, text=text))
        return f"engine {name} restarts: it was {runner.state.state}"

    def drain(self, name: str, *, who: str) -> str:
        runner = self._runner(name)
        text = f"drain asked for by {who}"
        self._parts.events.emit(name, "asked", text)
        runner.post(life.Event(life.EventKind.DRAIN_ASKED, text=text))
        return f"engine {name} drains, then stops: `stallwatch restart {name}` starts it again"

    def pause(self, name: str, *, seconds_: float, who: str) -> str:
        runner = self._runner(name)
        runner.pause(seconds_)
        text = f"limits of engine {name} rest for {seconds_:g} s, asked for by {who}"
        self._parts.events.emit(name, "paused", text)
        return text

    def stacks(self, name: str, *, native: bool = False) -> dict[str, Any]:
        known = self._runner(name).incarnation
        snapshot = known.latest() if known else None
        if known is None or snapshot is None or not known.members():
            raise StallwatchError(
                f"engine {name} has no process now", hint=f"see `stallwatch describe {name}`"
            )
        targets = known.targets(snapshot)
        # A ladder of its own: in the middle of a stall is when an operator asks.
        ladder = Ladder(self._parts.clock, self._parts.tools)
        ladder.run_folder = known.ladder.run_folder
        found = ladder.first(targets, deadline_s=2.0)
        if native:
            more = ladder.more(targets, found, deadline_s=10.0, samples=0)
            found = more[-1] if more else found
        return live(found, known.redactor)

    def chaos(
        self, name: str, *, fault: str, on: str, seed: int, seconds_: float, who: str
    ) -> dict[str, Any]:
        runner, wish = self._runner(name), desk.Wish(fault, on, seed, seconds_)
        enabled = self._parts.config.supervisor.chaos
        known = desk.allowed(wish, runner.incarnation, name=name, enabled=enabled)
        order, aim = desk.aimed(wish, known)
        text = f"chaos: {fault} into {aim.address}, asked for by {who}"
        self._parts.events.emit(name, "chaos", text, fault=fault, target=aim.address, seed=seed)
        began, said = desk.given(order, aim, known)
        ago = seconds(self._parts.clock.monotonic_ns() - began)
        return {"engine": name, **said, "began_at": rfc3339(self._parts.clock.wall() - ago)}

    # -- inside --------------------------------------------------------------------------------

    def _runner(self, name: str) -> Runner:
        try:
            return self._runners[name]
        except KeyError:
            known = ", ".join(sorted(self._runners)) or "none"
            raise UnknownEngine(f"no engine named {name!r}", hint=f"known: {known}") from None

    def _view(self, runner: Runner) -> EngineView:
        """State, lanes and processes of one moment: none of them from before a change of state."""
        for _ in range(_TRIES):
            state = runner.state
            view = self._composed(runner, state)
            now = runner.state
            if (now.state, now.incarnation) == (state.state, state.incarnation):
                break
        return view

    def _composed(self, runner: Runner, state: EngineState) -> EngineView:
        parts, known = self._parts, runner.incarnation
        now = parts.clock.monotonic_ns()
        snapshot = known.latest() if known else None
        members = known.members() if known else {}
        facts = known.facts() if known else None
        shown = known.redactor if known else _NOTHING_KNOWN

        def at(ns: int | None) -> str:
            return rfc3339(parts.clock.wall() - seconds(now - ns)) if ns else ""

        wait = seconds(state.restart_at_ns - now) if state.restart_at_ns else 0.0
        return EngineView(
            name=runner.name,
            state=state.state,
            wanted=state.wanted,
            up=bool(members),
            ready=state.ready and state.state in SERVING and not _blind(runner),
            enforce=state.enforce,
            incarnation=state.incarnation,
            root_pid=known.root_pid if known and members else 0,
            port=runner.config.port,
            command=tuple(known.command if known else redact_argv(runner.config.command)),
            restarts_in_window=state.budget.in_window(now),
            budget=state.budget.pace.limit,
            backoff_s=max(0.0, wait),
            started_at=at(facts.started_ns) if facts else "",
            ready_at=at(facts.ready_ns) if facts else "",
            reason=shown.redact(_reason(runner)),
            last_stall=runner.last_stall,
            processes=views.processes(snapshot, members, shown),
            lanes=views.lanes(snapshot, runner.policy, now, shown) if members else (),
            members=len(members),
            log_dropped=known.dropped if known else 0,
            top_frame=shown.redact(runner.top_frame),
            age_s=max(0.0, seconds(now - state.since_ns)),
            role="engine" if runner.name in parts.config.engines else "gateway",
            clients=door(parts.config, runner.name),
            comes_back=views.comes_back(state, now),
            exhausted_reason=shown.redact(state.budget.spent)
            if state.state is State.EXHAUSTED
            else "",
        )


def _blind(runner: Runner) -> bool:
    """Processes had attached, and the board cannot be read any more: nobody may call that ready."""
    snapshot = runner.incarnation.latest() if runner.incarnation else None
    return snapshot is not None and snapshot.image is None and bool(snapshot.recall.attached)


def _spawn_age_s(runner: Runner) -> float:
    return seconds(runner.parts.clock.monotonic_ns() - runner.state.since_ns)


def _reason(runner: Runner) -> str:
    """Why the engine is where it is. Still starting, what keeps it from READY is worth more."""
    known = runner.incarnation
    if _blind(runner):
        return "its heartbeat board is damaged: lanes are not judged; restart the engine"
    if runner.state.spawning and (late := _spawn_age_s(runner)) > _SPAWN_LATE_S:
        program = redact_argv(runner.config.command)[0]
        return f"{program} has not begun after {late:.0f} s: its file system may not answer"
    if runner.state.state is State.STARTING and known is not None:
        if known.readiness.foreign:
            return known.readiness.foreign
        if known.waits_for:
            return f"READY waits for {known.waits_for}"
    return runner.state.reason
