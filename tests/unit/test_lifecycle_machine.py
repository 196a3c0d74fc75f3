from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallwatch.diagnosis import kinds
from stallwatch.diagnosis.kinds import Kind
from stallwatch.lifecycle.budget import Budget, S
from stallwatch.lifecycle.cells import PREFLIGHT_TRIES
from stallwatch.lifecycle.engine import After, EngineState
from stallwatch.lifecycle.events import Do, Event, EventKind
from stallwatch.lifecycle.machine import TABLE, step
from stallwatch.lifecycle.states import State

E = EventKind
events = st.builds(
    Event,
    kind=st.sampled_from(EventKind),
    text=st.just("why"),
    retry=st.booleans(),
    action=st.sampled_from(kinds.Action),
    stall=st.sampled_from(Kind),
)
modes = st.sampled_from(["observe", "fail", "restart"])
policies = st.sampled_from(["by-kind", "always", "never"])


class Engine:
    """Drives the machine as a runner would, and keeps count of living trees."""

    def __init__(self, *, now: int = 0, **fields):
        self.state = EngineState(**fields)
        self.now = now
        self.orders: list = []
        self.pending: list[Do] = []

    def tell(self, kind: EventKind, **fields):
        self.now += S
        self.state, actions = step(self.state, Event(kind, **fields), self.now)
        self.orders = [a.do for a in actions]
        self.actions = actions
        self.pending += self.orders
        return self.state.state

    def up(self, **fields):
        self.tell(E.START_ASKED)
        self.tell(E.SPAWNED)
        self.tell(E.BECAME_READY)
        return self


def fail_once(engine: Engine) -> None:
    engine.tell(E.EXITED, stall=Kind.CHILD_DIED)
    engine.tell(E.TREE_GONE)
    if engine.state.state is State.BACKOFF:
        engine.now = engine.state.restart_at_ns
        engine.tell(E.BACKOFF_OVER)
        engine.tell(E.SPAWNED)


def test_the_table_is_total():
    """Every event has a cell in every state."""
    assert set(TABLE) == set(EventKind)
    for row in TABLE.values():
        assert set(row) == set(State)


@given(
    event=events,
    state=st.builds(
        EngineState,
        state=st.sampled_from(State),
        up=st.booleans(),
        ready=st.booleans(),
        spawning=st.booleans(),
        after=st.sampled_from(After),
        enforce=modes,
        policy=policies,
        wanted=st.booleans(),
    ),
)
def test_every_pair_answers_with_a_state_and_orders(event, state):
    """Also from states that no sequence reaches, a step never raises and never spawns beside a tree."""
    new, actions = step(state, event, 5)

    assert isinstance(new.state, State)
    if any(a.do is Do.PREFLIGHT_AND_SPAWN for a in actions):
        assert not state.up
    if new.state is not state.state:
        assert new.since_ns == 5
        assert [a.do for a in actions][-2:] == [Do.SAVE_STATE, Do.ANNOUNCE]


@pytest.mark.slow
@settings(max_examples=60)
@given(st.lists(st.tuples(events, st.integers(0, 900 * S)), max_size=80), modes, policies)
def test_no_sequence_makes_two_trees_or_overspends(sequence, enforce, policy):
    """Any events in any order: one tree at most, budget kept, EXHAUSTED and UNKILLABLE absorb."""
    state = EngineState(enforce=enforce, policy=policy)
    now, trees, spawning, restarts = 0, 0, False, []
    for event, later in sequence:
        now += later
        # The world: a spawn is answered once, and only when asked; a tree ends when it is told.
        if event.kind in (E.SPAWNED, E.SPAWN_FAILED, E.PREFLIGHT_FAILED):
            if not spawning:
                continue
            spawning, trees = False, trees + (event.kind is E.SPAWNED)
        if event.kind is E.TREE_GONE:
            trees = 0
        if event.kind is E.KILL_SURVIVED and not trees:
            continue
        before = state
        state, actions = step(before, event, now)
        for order in actions:
            if order.do is Do.PREFLIGHT_AND_SPAWN:
                assert trees == 0
                assert not spawning
                spawning = True
        if event.kind is E.BACKOFF_OVER and len(state.budget.stamps) and state != before:
            restarts = [*restarts, now] if state.budget.total > before.budget.total else restarts
        if event.kind in (E.RESTART_ASKED, E.HEALTHY):
            restarts = []
        assert trees <= 1
        assert sum(1 for at in restarts if at > now - 1800 * S) <= 5
        assert trees == 0 or state.up
        if before.state is State.UNKILLABLE and event.kind is not E.RESTART_ASKED:
            assert state.state is State.UNKILLABLE
        if before.state is State.EXHAUSTED and event.kind is not E.RESTART_ASKED:
            asked = event.kind in (E.STOP_ASKED, E.DRAIN_ASKED)
            assert state.state is State.EXHAUSTED or asked
        if enforce == "observe" and event.kind in (E.DECLARED, E.EVIDENCE_DONE, E.EXITED):
            kills = any(order.do is Do.KILL for order in actions)
            assert not kills or before.state is State.DRAINING


@pytest.mark.slow
@settings(max_examples=60)
@given(
    st.lists(events, max_size=40),
    modes,
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_a_stop_always_ends(sequence, enforce, dies, random):
    """From wherever events have led, a stop that the runner carries out ends STOPPED or UNKILLABLE."""
    engine = Engine(enforce=enforce)
    for event in sequence:
        engine.state, actions = step(engine.state, event, engine.now)
        engine.pending += [a.do for a in actions]
    owed = [Do.PREFLIGHT_AND_SPAWN] if engine.state.spawning else []
    if engine.state.up and engine.state.state in (State.STOPPING, State.FAILED):
        owed.append(Do.KILL)  # the runner still has it in hand
    engine.pending = owed
    engine.tell(E.STOP_ASKED)
    for _ in range(20):
        if engine.state.state in (State.STOPPED, State.UNKILLABLE) or not engine.pending:
            break
        order = engine.pending.pop(0)
        if order is Do.PREFLIGHT_AND_SPAWN:
            engine.tell(random.choice([E.SPAWNED, E.SPAWN_FAILED, E.PREFLIGHT_FAILED]))
        elif order is Do.DRAIN:
            engine.tell(random.choice([E.DRAINED, E.GRACE_OVER]))
        elif order is Do.STOP:
            engine.tell(random.choice([E.TREE_GONE, E.GRACE_OVER]))
        elif order is Do.KILL:
            engine.tell(E.TREE_GONE if dies else E.KILL_SURVIVED)

    assert engine.state.state in (State.STOPPED, State.UNKILLABLE)
    assert not engine.state.wanted


def test_the_whole_path_of_a_stall():
    """Suspicion, verdict, evidence, kill, back-off and a new incarnation follow in this order."""
    engine = Engine().up()
    assert engine.tell(E.SUSPECTED) is State.SUSPECT
    assert Do.COLLECT in engine.orders
    assert engine.tell(E.DECLARED, stall=Kind.DEVICE_WAIT, failure_id="st-1") is State.STALLED
    assert engine.orders[:2] == [Do.DECLARE, Do.FINISH_EVIDENCE]
    assert engine.actions[0].action is kinds.Action.RESTART
    assert engine.tell(E.EVIDENCE_DONE) is State.FAILED
    assert Do.KILL in engine.orders
    assert engine.tell(E.TREE_GONE) is State.BACKOFF
    assert 1 * S <= engine.state.restart_at_ns - engine.now <= 1.2 * S
    assert engine.tell(E.BACKOFF_OVER) is State.STARTING
    assert Do.PREFLIGHT_AND_SPAWN in engine.orders
    assert engine.state.incarnation == 2
    assert engine.state.failure_id == ""


def test_a_withdrawn_suspicion_returns_to_where_it_was():
    """An engine that moved at the third look serves on; one that was starting is still starting."""
    ready = Engine().up()
    ready.tell(E.SUSPECTED)
    starting = Engine()
    starting.tell(E.START_ASKED)
    starting.tell(E.SPAWNED)
    starting.tell(E.SUSPECTED)

    assert ready.tell(E.WITHDRAWN) is State.READY
    assert starting.tell(E.WITHDRAWN) is State.STARTING


def test_only_a_failure_dooms_a_tree():
    """From the verdict to its end a tree is doomed; not under suspicion, nor when only observed."""
    engine = Engine().up()
    watched = Engine(enforce="observe").up()
    for one in (engine, watched):
        one.tell(E.SUSPECTED)
        assert not one.state.doomed
        one.tell(E.DECLARED, stall=Kind.GIL_HELD)

    assert engine.state.doomed
    engine.tell(E.EVIDENCE_DONE)
    assert engine.state.doomed
    engine.tell(E.TREE_GONE)
    assert not engine.state.doomed
    assert watched.state.state is State.STALLED
    assert not watched.state.doomed


def test_observe_touches_nothing():
    """Observing, a verdict and a recovery come and go without a kill; an exit is not restarted."""
    engine = Engine(enforce="observe").up()
    engine.tell(E.SUSPECTED)
    assert engine.tell(E.DECLARED, stall=Kind.GIL_HELD) is State.STALLED
    assert engine.actions[0].action is kinds.Action.OBSERVE
    engine.tell(E.EVIDENCE_DONE)
    assert engine.tell(E.RECOVERED) is State.READY
    assert engine.tell(E.EXITED, stall=Kind.CHILD_DIED) is State.FAILED
    assert engine.tell(E.TREE_GONE) is State.FAILED

    assert Do.KILL not in engine.pending
    assert Do.ARM_BACKOFF not in engine.pending


@pytest.mark.parametrize(
    ("enforce", "policy", "kind", "end"),
    [
        ("restart", "by-kind", Kind.DEVICE_WAIT, State.BACKOFF),
        ("restart", "by-kind", Kind.STALE_LOCK_FILE, State.FAILED),
        ("restart", "by-kind", Kind.REMOTE_PEER_WAIT, State.FAILED),
        ("restart", "always", Kind.STALE_LOCK_FILE, State.BACKOFF),
        ("restart", "never", Kind.DEVICE_WAIT, State.FAILED),
        ("fail", "always", Kind.DEVICE_WAIT, State.FAILED),
        ("restart", "by-kind", Kind.PAUSED_TOO_LONG, State.READY),
    ],
)
def test_restart_goes_by_mode_policy_and_kind(enforce, policy, kind, end):
    """What follows a verdict is decided by all three; an alert leaves the engine serving."""
    engine = Engine(enforce=enforce, policy=policy).up()
    engine.tell(E.SUSPECTED)
    engine.tell(E.DECLARED, stall=kind)
    engine.tell(E.EVIDENCE_DONE)
    engine.tell(E.TREE_GONE) if engine.state.state is State.FAILED else None

    assert engine.state.state is end


def test_an_engine_that_dies_at_once_is_given_up_after_three():
    """Three restarts that never reach READY exhaust it; a start is refused, a restart resets."""
    engine = Engine()
    engine.tell(E.START_ASKED)
    engine.tell(E.SPAWNED)
    for _ in range(4):
        fail_once(engine)

    assert engine.state.state is State.EXHAUSTED
    assert engine.state.incarnation == 4
    engine.tell(E.STOP_ASKED)
    assert engine.state.state is State.STOPPED
    assert engine.tell(E.START_ASKED) is State.EXHAUSTED
    assert engine.tell(E.RESTART_ASKED) is State.STARTING
    assert engine.state.budget.refusal(engine.now) == ""


def test_a_crash_after_ready_is_bounded_too():
    """An engine that becomes READY each time and dies gets five restarts in the window."""
    engine = Engine().up()
    while engine.state.state is not State.EXHAUSTED and engine.state.incarnation < 20:
        fail_once(engine)
        engine.tell(E.BECAME_READY)

    assert engine.state.incarnation == 6
    assert "budget is 5" in engine.state.reason


def test_ten_healthy_minutes_forgive():
    """HEALTHY empties the window, so the next back-off is the first one again."""
    engine = Engine().up()
    for _ in range(3):
        fail_once(engine)
        engine.tell(E.BECAME_READY)
    engine.tell(E.HEALTHY)

    assert engine.state.budget.stamps == ()
    assert engine.state.budget.delay_ns(engine.now) <= 1.2 * S


def test_a_busy_port_is_waited_for_but_not_for_ever():
    """A retriable pre-flight failure waits in BACKOFF, charges nothing, and ends in FAILED."""
    engine = Engine()
    engine.tell(E.START_ASKED)
    for _ in range(PREFLIGHT_TRIES - 1):
        assert engine.tell(E.PREFLIGHT_FAILED, text="port 1 is busy", retry=True) is State.BACKOFF
        assert engine.tell(E.BACKOFF_OVER) is State.STARTING

    assert engine.tell(E.PREFLIGHT_FAILED, text="port 1 is busy", retry=True) is State.FAILED
    assert engine.state.reason == "port 1 is busy"
    assert engine.state.budget.stamps == ()
    assert engine.state.incarnation == 1


def test_a_stop_before_the_spawn_is_answered_kills_what_comes():
    """The tree that a late spawn delivers is ended; nothing is left running."""
    engine = Engine()
    engine.tell(E.START_ASKED)
    assert engine.tell(E.STOP_ASKED) is State.STOPPING
    assert engine.orders[:1] == [Do.SAVE_STATE]
    engine.tell(E.SPAWNED)
    assert Do.KILL in engine.orders
    assert engine.tell(E.TREE_GONE) is State.STOPPED


def test_a_restart_asked_for_stops_in_order_and_is_not_charged():
    """An operator's restart drains and stops first, and costs no budget."""
    engine = Engine().up()
    assert engine.tell(E.RESTART_ASKED, text="asked by anna") is State.STOPPING
    assert Do.STOP in engine.orders
    assert engine.tell(E.TREE_GONE) is State.STARTING
    assert engine.state.incarnation == 2
    assert engine.state.budget.stamps == ()


@pytest.mark.parametrize(
    ("asked", "kind", "action"),
    [
        (E.STOP_ASKED, Kind.SHUTDOWN_HANG, kinds.Action.FAIL),
        (E.STOP_ASKED, Kind.DEVICE_WAIT, kinds.Action.FAIL),
        (E.RESTART_ASKED, Kind.SHUTDOWN_HANG, kinds.Action.RESTART),
        (E.RESTART_ASKED, Kind.DEVICE_WAIT, kinds.Action.RESTART),
    ],
)
def test_a_stall_on_the_way_down_says_what_was_asked_for(asked, kind, action):
    """Nothing is restarted after a stop that hangs; a restart that hangs is one all the same."""
    engine = Engine().up()
    assert engine.tell(asked) is State.STOPPING
    told = Event(E.DECLARED, stall=kind, failure_id="st-1")
    engine.state, actions = step(engine.state, told, engine.now)
    assert [(a.do, a.action) for a in actions] == [(Do.DECLARE, action)]


def test_a_back_off_outlives_the_daemon():
    """A new daemon that starts inside the old one's back-off waits for its rest."""
    engine = Engine(now=0, budget=Budget().held_until(60 * S))

    assert engine.tell(E.START_ASKED) is State.BACKOFF
    assert engine.state.restart_at_ns == 60 * S


def test_a_survivor_of_sigkill_is_never_restarted_onto():
    """UNKILLABLE stays until an operator asks, and then the old tree is killed before any spawn."""
    engine = Engine().up()
    engine.tell(E.EXITED)
    assert engine.tell(E.KILL_SURVIVED, text="pid 7 (D)") is State.UNKILLABLE
    assert engine.tell(E.START_ASKED) is State.UNKILLABLE
    assert engine.tell(E.RESTART_ASKED) is State.FAILED
    assert Do.KILL in engine.orders
    assert Do.PREFLIGHT_AND_SPAWN not in engine.orders
    assert engine.tell(E.TREE_GONE) is State.STARTING


def test_stopping_a_stalled_engine_kills_it():
    """A SIGTERM to a failed tree would truncate answers: STOP is not ordered."""
    engine = Engine().up()
    engine.tell(E.SUSPECTED)
    engine.tell(E.DECLARED, stall=Kind.DEVICE_WAIT)
    engine.tell(E.STOP_ASKED)

    assert Do.KILL in engine.orders
    assert Do.STOP not in engine.orders


def test_the_state_value_is_immutable():
    """A step returns a new value; the old one is untouched."""
    before = EngineState()
    step(before, Event(E.START_ASKED), 1)

    assert before == replace(before)
    assert before.state is State.STOPPED
