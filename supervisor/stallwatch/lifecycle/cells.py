"""The cells of the life table: small pure functions (state, event, now) -> (state, orders).

None does I/O or reads a clock. Names say what the cell does, not where it stands in the table.
"""

# ruff: noqa: ARG001 - every cell has the same three parameters, whichever it needs

from __future__ import annotations

from dataclasses import replace

from stallwatch.diagnosis import kinds
from stallwatch.diagnosis.policy import action_for
from stallwatch.lifecycle.engine import After, EngineState
from stallwatch.lifecycle.events import Action, Do, Event
from stallwatch.lifecycle.states import State

Result = tuple[EngineState, tuple[Action, ...]]

PREFLIGHT_TRIES = 6  # 1 + 5 + 15 + 60 + 120 s of waiting; then the cause is stated, not retried
_WEIGHT = {a: n for n, a in enumerate(("observe", "alert", "fail", "restart"))}
_COLLECT, _KILL, _STOP = Action(Do.COLLECT), Action(Do.KILL), Action(Do.STOP)
_CLEAR = Action(Do.CLEAR)


def effective(state: EngineState, event: Event) -> kinds.Action:
    """What is really done about a verdict: the weaker of what diagnosis and the operator allow."""
    allowed = action_for(event.stall, state.enforce, state.policy)
    return min(allowed, event.action, key=_WEIGHT.__getitem__)


# -- helpers: not cells ------------------------------------------------------------------------


def _declare(e: Event, action: kinds.Action) -> Action:
    return Action(Do.DECLARE, text=e.text, action=action, stall=e.stall, failure_id=e.failure_id)


def _base(s: EngineState) -> State:
    return State.READY if s.ready else State.STARTING


def _observes(s: EngineState) -> bool:
    return s.enforce == "observe"


def _begin(s: EngineState, reason: str = "") -> Result:
    """Order a spawn; with a tree that may live, its end first. Never two trees."""
    if s.up:
        down = replace(s, state=State.FAILED, after=After.AGAIN, ready=False, reason=reason)
        return down, (_CLEAR, _KILL)
    fresh = replace(
        s,
        state=State.STARTING,
        wanted=True,
        ready=False,
        spawning=True,
        incarnation=s.incarnation + (s.preflight_tries == 0),
        after=After.FAIL,
        reason=reason,
        failure_id="",
        restart_at_ns=None,
    )
    return fresh, (_CLEAR, Action(Do.PREFLIGHT_AND_SPAWN))


def _backoff(s: EngineState, delay_ns: int, now: int) -> Result:
    at = now + delay_ns
    s = replace(s, state=State.BACKOFF, restart_at_ns=at, budget=s.budget.held_until(at))
    return s, (Action(Do.ARM_BACKOFF, delay_ns=delay_ns),)


def _restart_or_give_up(s: EngineState, now: int) -> Result:
    why = s.budget.refusal(now)
    if why:
        spent = s.budget.exhausted(why)
        return replace(s, state=State.EXHAUSTED, budget=spent, reason=why), ()
    return _backoff(s, s.budget.delay_ns(now), now)


def _ended(s: EngineState, now: int) -> Result:
    """No tree is left: what was decided before its end now happens."""
    s = replace(s, up=False, ready=False, spawning=False)
    if s.after is After.AGAIN and s.wanted:
        return _begin(s, s.reason)
    if s.after is After.STOP or not s.wanted:
        return replace(s, state=State.STOPPED, failure_id="", restart_at_ns=None), (_CLEAR,)
    if s.after is After.RESTART:
        return _restart_or_give_up(s, now)
    return replace(s, state=State.FAILED), ()


# -- cells -------------------------------------------------------------------------------------


def keep(s: EngineState, e: Event, now: int) -> Result:
    return s, ()


def start(s: EngineState, e: Event, now: int) -> Result:
    """A start is no way round a spent budget or a back-off that a daemon's death cut short."""
    s = replace(s, wanted=True, preflight_tries=0)
    if s.budget.spent:
        return replace(s, state=State.EXHAUSTED, reason=s.budget.spent), ()
    if s.budget.not_before_ns > now and not s.up:
        s = replace(s, reason="a back-off from before is not over")
        return _backoff(s, s.budget.not_before_ns - now, now)
    return _begin(s, e.text)


def start_after_stop(s: EngineState, e: Event, now: int) -> Result:
    return replace(s, wanted=True, after=After.AGAIN), ()


def spawned(s: EngineState, e: Event, now: int) -> Result:
    if not s.spawning:
        return s, ()
    return replace(s, up=True, spawning=False, preflight_tries=0), ()


def spawned_too_late(s: EngineState, e: Event, now: int) -> Result:
    """A tree nobody wants any more: it has served nobody, so it is ended without ceremony."""
    return replace(s, up=True, spawning=False), (_KILL,)


def spawned_while_stopped(s: EngineState, e: Event, now: int) -> Result:
    s = replace(s, state=State.STOPPING, after=After.STOP, reason="a late spawn")
    return spawned_too_late(s, e, now)


def spawned_in_backoff(s: EngineState, e: Event, now: int) -> Result:
    s = replace(s, state=State.FAILED, after=After.RESTART, reason="a late spawn")
    s, actions = spawned_too_late(s, e, now)
    return s, (_CLEAR, *actions)


def spawn_failed(s: EngineState, e: Event, now: int) -> Result:
    if s.up or not s.spawning:
        return replace(s, spawning=False), ()
    after = After.RESTART if e.retry and s.enforce == "restart" else After.FAIL
    return _ended(replace(s, after=after, reason=e.text), now)


def preflight_failed(s: EngineState, e: Event, now: int) -> Result:
    """Nothing was started, so nothing is charged; waiting is bounded, then the cause is stated."""
    if not s.spawning:
        return s, ()
    s = replace(s, spawning=False, reason=e.text, preflight_tries=s.preflight_tries + 1)
    if e.retry and s.preflight_tries < PREFLIGHT_TRIES:
        steps = s.budget.pace.delays_ns or (0,)
        return _backoff(s, steps[min(s.preflight_tries, len(steps)) - 1], now)
    return replace(s, state=State.FAILED, after=After.FAIL, preflight_tries=0), ()


def no_spawn(s: EngineState, e: Event, now: int) -> Result:
    """A stop was asked for while the spawn was under way, and the spawn failed."""
    if s.up or not s.spawning:
        return replace(s, spawning=False), ()
    return _ended(s, now)


def became_ready(s: EngineState, e: Event, now: int) -> Result:
    if not s.up:
        return s, ()
    s, _ = note_ready(s, e, now)
    return replace(s, state=State.READY, reason=e.text), ()


def note_ready(s: EngineState, e: Event, now: int) -> Result:
    """READY under suspicion is a fact worth keeping; the suspicion stands."""
    if not s.up:
        return s, ()
    return replace(s, ready=True, ever_ready=True, budget=s.budget.progressed()), ()


def note_ready_if_observing(s: EngineState, e: Event, now: int) -> Result:
    return note_ready(s, e, now) if _observes(s) else (s, ())


def served(s: EngineState, e: Event, now: int) -> Result:
    return replace(s, budget=s.budget.progressed()), ()


def healthy(s: EngineState, e: Event, now: int) -> Result:
    return replace(s, budget=s.budget.reset()), ()


def suspect(s: EngineState, e: Event, now: int) -> Result:
    if not s.up:
        return s, ()
    return replace(s, state=State.SUSPECT, reason=e.text), (_COLLECT,)


def collect(s: EngineState, e: Event, now: int) -> Result:
    """A stop that hangs gets its stacks; it changes no course that is already set."""
    return s, ((_COLLECT,) if s.up else ())


def withdraw(s: EngineState, e: Event, now: int) -> Result:
    return replace(s, state=_base(s), reason=e.text), ()


def declare(s: EngineState, e: Event, now: int) -> Result:
    """The verdict. Observing says it; alerting says it and lets the engine serve on."""
    if not s.up:
        return s, ()
    action = effective(s, e)
    told = _declare(e, action)
    s = replace(s, reason=e.text, failure_id=e.failure_id)
    if action is kinds.Action.ALERT:
        return replace(s, state=_base(s)), (told,)
    if action is kinds.Action.OBSERVE:
        return replace(s, state=State.STALLED), (told, Action(Do.FINISH_EVIDENCE))
    after = After.RESTART if action is kinds.Action.RESTART else After.FAIL
    s = replace(s, state=State.STALLED, after=after, ready=False)
    return s, (told, Action(Do.FINISH_EVIDENCE))


def declare_again(s: EngineState, e: Event, now: int) -> Result:
    """Observing, a second verdict on the same incarnation is news; otherwise the first stands."""
    if not _observes(s):
        return s, ()
    s = replace(s, reason=e.text, failure_id=e.failure_id)
    return s, (_declare(e, kinds.Action.OBSERVE),)


def declare_only(s: EngineState, e: Event, now: int) -> Result:
    """The stop decides what follows, not the verdict: restarted only if a restart was asked for."""
    action = effective(s, e)
    if _WEIGHT[action] >= _WEIGHT[kinds.Action.FAIL]:
        again = s.after is After.AGAIN and s.wanted
        action = kinds.Action.RESTART if again else kinds.Action.FAIL
    return s, (_declare(e, action),)


def declare_draining(s: EngineState, e: Event, now: int) -> Result:
    """A stalled engine will not drain: its clients are answered, and it ends now."""
    action = effective(s, e)
    told = _declare(e, action)
    if _WEIGHT[action] < _WEIGHT[kinds.Action.FAIL]:
        return s, (told,)
    s = replace(s, state=State.STOPPING, ready=False, reason=e.text, failure_id=e.failure_id)
    return s, (told, _KILL)


def evidence_done(s: EngineState, e: Event, now: int) -> Result:
    if _observes(s):
        return s, ()
    return replace(s, state=State.FAILED, ready=False), (_KILL,)


def recover(s: EngineState, e: Event, now: int) -> Result:
    """Only an observed stall may recover: after a FAILURE the clients have been told."""
    if not _observes(s):
        return s, ()
    return replace(s, state=_base(s), reason=e.text, failure_id=""), (_CLEAR,)


def exited(s: EngineState, e: Event, now: int) -> Result:
    """Nobody asked for it: a failure, exit status 0 included (vLLM dies with 0)."""
    if not s.up:
        return s, ()
    action = effective(s, e)
    after = After.RESTART if action is kinds.Action.RESTART else After.FAIL
    s = replace(
        s, state=State.FAILED, after=after, ready=False, reason=e.text, failure_id=e.failure_id
    )
    told = _declare(e, action)
    return s, ((told,) if _observes(s) else (told, _KILL))


def gone(s: EngineState, e: Event, now: int) -> Result:
    """The whole tree ended unasked. Observing, that is all; else the kill sweeps what is left."""
    s, actions = exited(s, e, now)
    return (replace(s, up=False) if _observes(s) else s), actions


def exited_stalled(s: EngineState, e: Event, now: int) -> Result:
    """After a FAILURE the kill is on its way and will find it dead."""
    return exited(s, e, now) if _observes(s) else (s, ())


def gone_stalled(s: EngineState, e: Event, now: int) -> Result:
    return gone(s, e, now) if _observes(s) else (replace(s, up=False), ())


def exited_draining(s: EngineState, e: Event, now: int) -> Result:
    """A drain asks for no exit: whoever was being served lost."""
    s = replace(s, state=State.STOPPING, ready=False, reason=e.text, failure_id=e.failure_id)
    return s, (_declare(e, effective(s, e)), _KILL)


def ended(s: EngineState, e: Event, now: int) -> Result:
    return _ended(s, now) if s.up or not s.spawning else (s, ())


def note_gone(s: EngineState, e: Event, now: int) -> Result:
    return replace(s, up=False), ()


def failed_gone(s: EngineState, e: Event, now: int) -> Result:
    """Twice is once: a tree that was already down decides nothing again."""
    return _ended(s, now) if s.up else (s, ())


def unkillable(s: EngineState, e: Event, now: int) -> Result:
    s = replace(s, state=State.UNKILLABLE, up=True, ready=False, spawning=False, restart_at_ns=None)
    return replace(s, reason=e.text or "a process survives SIGKILL"), (_CLEAR,)


def note_survivor(s: EngineState, e: Event, now: int) -> Result:
    return replace(s, up=True), ()


def _unwanted(s: EngineState, e: Event) -> EngineState:
    # Asked for by an operator: a back-off need not be honoured at the next start.
    budget = s.budget.held_until(0)
    return replace(
        s, wanted=False, after=After.STOP, budget=budget, restart_at_ns=None, reason=e.text
    )


def stop(s: EngineState, e: Event, now: int) -> Result:
    """Before the spawn is answered there is nothing to stop: its answer will find STOPPING."""
    s = replace(_unwanted(s, e), state=State.STOPPING)
    return s, ((_STOP,) if s.up else ())


def stop_stalled(s: EngineState, e: Event, now: int) -> Result:
    """A SIGTERM to a failed tree gives its clients truncated answers: kill."""
    if _observes(s):
        return stop(s, e, now)
    return replace(_unwanted(s, e), state=State.STOPPING, ready=False), (_KILL,)


def stop_down(s: EngineState, e: Event, now: int) -> Result:
    s = _unwanted(s, e)
    if s.up:
        return replace(s, state=State.STOPPING), (_KILL,)
    return _ended(s, now)


def unwant(s: EngineState, e: Event, now: int) -> Result:
    return replace(s, wanted=False, after=After.STOP), ()


def drain(s: EngineState, e: Event, now: int) -> Result:
    return replace(_unwanted(s, e), state=State.DRAINING), (Action(Do.DRAIN),)


def drain_stalled(s: EngineState, e: Event, now: int) -> Result:
    return drain(s, e, now) if _observes(s) else stop_stalled(s, e, now)


def drained(s: EngineState, e: Event, now: int) -> Result:
    return replace(s, state=State.STOPPING), (_STOP,)


def grace_over(s: EngineState, e: Event, now: int) -> Result:
    return s, ((_COLLECT, _KILL) if s.up else ())


def backoff_over(s: EngineState, e: Event, now: int) -> Result:
    if s.preflight_tries == 0:
        s = replace(s, budget=s.budget.restarted(now))
    else:
        s = replace(s, budget=s.budget.held_until(0))
    return _begin(s, s.reason)


def _forgiven(s: EngineState, e: Event) -> EngineState:
    return replace(s, wanted=True, budget=s.budget.reset(), preflight_tries=0, reason=e.text)


def restart(s: EngineState, e: Event, now: int) -> Result:
    """A living tree is stopped in order first; one being spawned is what was asked for."""
    s = _forgiven(s, e)
    if not s.up:
        return s, ()
    return replace(s, state=State.STOPPING, after=After.AGAIN), (_STOP,)


def restart_stalled(s: EngineState, e: Event, now: int) -> Result:
    if _observes(s):
        return restart(s, e, now)
    return replace(_forgiven(s, e), after=After.AGAIN), ()


def restart_stopping(s: EngineState, e: Event, now: int) -> Result:
    return replace(_forgiven(s, e), after=After.AGAIN), ()


def restart_down(s: EngineState, e: Event, now: int) -> Result:
    return _begin(_forgiven(s, e), e.text)
