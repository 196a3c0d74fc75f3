"""The rules, one look at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stallwatch.board.image import LaneClass
from stallwatch.lifecycle.states import State
from stallwatch.testing.snapshots import (
    T0,
    engine,
    facts,
    frame,
    lane,
    lease,
    ns,
    process,
    snapshot,
)
from stallwatch.watch.finding import Finding, Level, Rule
from stallwatch.watch.policy import Policy
from stallwatch.watch.rules import evaluate
from stallwatch.watch.snapshot import Exit, Recall, Snapshot

POLICY = Policy()


def judge(snap: Snapshot, policy: Policy = POLICY) -> tuple[Finding, ...]:
    return evaluate(snap, snap.now_ns, policy)


def rules(snap: Snapshot, policy: Policy = POLICY) -> list[tuple[str, str]]:
    return [(f.rule.value, f.level.value) for f in judge(snap, policy)]


PHASE = Rule.PHASE_OVER_LIMIT.value


@pytest.mark.parametrize(
    ("age", "expected"), [(29.9, []), (30.0, ["warn"]), (59.9, ["warn"]), (60.0, ["over"])]
)
def test_half_the_limit_warns_and_the_limit_is_over(age, expected):
    """A work phase warns at 50 % of its limit and is over at 100 %."""
    snap = snapshot(T0 + age, [lane("model", frame(at=T0))])
    assert [level for _, level in rules(snap)] == expected


def test_explicit_beats_configured_beats_learned_beats_default():
    """The limit in force is the most deliberate one."""
    policy = Policy(phases={"a": ns(7), "b": ns(7)}, learned={"a": ns(3), "b": ns(3), "c": ns(3)})
    found = {
        name: judge(snapshot(T0 + 1000, [lane("model", frame(name, at=T0, limit=limit))]), policy)
        for name, limit in (("a", 5.0), ("b", 0.0), ("c", 0.0), ("d", 0.0))
    }
    assert {n: f[0].limit_ns for n, f in found.items()} == {
        "a": ns(5),
        "b": ns(7),
        "c": ns(3),
        "d": ns(60),
    }


def test_progress_restarts_only_the_innermost_phase():
    """Fresh progress inside never masks an outer phase that is over its own limit."""
    outer = frame("request", at=T0, limit=50)
    inner = frame("step", at=T0 + 59.5, progress=T0 + 59.9, limit=10)
    found = judge(snapshot(T0 + 60, [lane("model", outer, inner)]))
    assert [(f.subject.phase, f.level) for f in found] == [("request", Level.OVER)]


def test_the_outer_fingerprint_ignores_beats_of_the_inner_phase():
    """An outer phase is confirmed although its inner phases keep moving."""
    outer = frame("request", at=T0, limit=50)
    one, two = (
        judge(
            snapshot(T0 + at, [lane("model", outer, frame("step", at=T0 + at), beats=int(at * 10))])
        )
        for at in (60.0, 60.1)
    )
    assert one[0].key == two[0].key
    assert one[0].fingerprint == two[0].fingerprint


def test_progress_counts_for_the_innermost():
    """A long phase that reports progress is not late."""
    snap = snapshot(T0 + 500, [lane("model", frame(at=T0, progress=T0 + 490))])
    assert judge(snap) == ()


def test_idle_is_never_late():
    """F2: waiting for work has no limit, however long and whatever it waits on."""
    idle = lane("model", frame("idle", LaneClass.IDLE, at=0.001), wait_on="worker:0/x")
    outer = lane("loop", frame("serve", at=0.001, limit=1), frame("idle", LaneClass.IDLE, at=1.0))
    assert judge(snapshot(T0 + 1e6, [idle, outer])) == ()


def test_waiting_on_a_peer_has_a_limit_too():
    """A wait is judged like work; whose fault it is, diagnosis says."""
    waiter = lane("main", frame("step_result", LaneClass.WAIT, at=T0), wait_on="worker:0/model")
    assert rules(snapshot(T0 + 61, [waiter])) == [(PHASE, "over")]


def test_a_channel_is_judged_like_a_lane():
    """A device queue has phases but no thread."""
    channel = lane("stream", frame("step", at=T0), channel=True, tid=0)
    snap = snapshot(T0 + 61, [channel], procs=[facts(100, tids=frozenset({100}))])
    assert rules(snap) == [(PHASE, "over")]


@pytest.mark.parametrize("change", [{"closed": True}, {"pid": 999}, {"start_ticks": 2}])
def test_closed_lanes_and_lanes_of_strangers_are_not_judged(change):
    """A lane counts only while it is open and its process is a living member."""
    one = replace(lane("model", frame(at=T0)), **change)
    snap = snapshot(T0 + 500, [one], procs=[facts(100)], processes=[process()])
    assert judge(snap) == ()


def test_a_moving_lane_is_alive():
    """A lane that could not be read because it is being written is not late."""
    one = lane("model", frame(at=T0))
    assert judge(snapshot(T0 + 500, [one], moving=("worker:0/model",))) == ()


def test_a_torn_lane_is_judged_by_its_last_good_copy():
    """A writer stopped inside an update does not hide by it."""
    assert rules(snapshot(T0 + 61, [lane("model", frame(at=T0), torn=True)])) == [(PHASE, "over")]


def test_a_healthy_shard_masks_nobody():
    """Trap 7: each lane is judged alone; seven fresh ranks do not excuse the eighth."""
    lanes = [lane("model", frame(at=T0 + 60), rank=r, pid=100 + r) for r in range(7)]
    stuck = lane("model", frame(at=T0), rank=7, pid=107)
    found = judge(snapshot(T0 + 61, [*lanes, stuck]))
    assert [f.subject.lane for f in found] == ["worker:7/model"]


# -- warm-up ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "levels"), [(0, []), (4, []), (5, ["over"]), (None, ["over"])])
def test_the_first_steps_may_compile(steps, levels):
    """F1: until five steps are done work and waits use the compile limit."""
    lanes = [
        lane("model", frame(at=T0)),
        lane("main", frame("step_result", LaneClass.WAIT, at=T0), role="core", pid=101),
    ]
    snap = snapshot(T0 + 120, lanes, recall=Recall(steps=steps))
    assert [level for _, level in rules(snap)] == levels * 2


def test_an_event_loop_never_compiles():
    """The warm-up exemption does not hide a blocked event loop."""
    snap = snapshot(
        T0 + 31, [lane("loop", frame("loop", at=T0), role="api")], recall=Recall(steps=0)
    )
    assert rules(snap) == [(PHASE, "over")]


def test_peers_may_wait_for_the_slowest_loader():
    """F1: before READY a wait is bounded by the start limits, not by the default of 60 s."""
    waiter = lane("main", frame("load_model", LaneClass.WAIT, at=T0), role="core", pid=101)
    facts_ = engine(State.STARTING, started=T0, side_progress_ns=ns(T0 + 590))
    assert judge(snapshot(T0 + 600, [waiter], engine=facts_, recall=Recall(steps=0))) == ()


# -- starting -----------------------------------------------------------------------------------


def test_side_progress_extends_a_start_phase():
    """F1: a silent load is fine while memory, bytes or compiler children of its process move."""
    one = lane("main", frame("load_weights", LaneClass.START, at=T0, limit=100))
    moving = engine(pid_side_progress_ns={100: ns(T0 + 190)})
    other = engine(pid_side_progress_ns={101: ns(T0 + 190)})
    assert judge(snapshot(T0 + 200, [one], engine=moving)) == ()
    assert rules(snapshot(T0 + 200, [one], engine=other)) == [(PHASE, "over")]


def test_side_progress_does_not_extend_for_ever():
    """A START phase as a whole ends at the start limit, whatever moves beside it."""
    one = lane("main", frame("load_weights", LaneClass.START, at=T0, limit=100))
    moving = engine(pid_side_progress_ns={100: ns(T0 + 1800)})
    assert rules(snapshot(T0 + 1801, [one], engine=moving)) == [(PHASE, "over")]


def test_reported_progress_extends_a_start_phase_as_long_as_it_comes():
    """Shards counted by the phase itself are progress, not noise beside it."""
    loading = frame("load_weights", LaneClass.START, at=T0, progress=T0 + 3590, limit=100)
    assert judge(snapshot(T0 + 3600, [lane("main", loading)])) == ()


@pytest.mark.parametrize(
    ("age", "side", "keys"),
    [
        (299.0, 0.0, []),
        (601.0, 0.0, ["never-ready:silence"]),
        (1000.0, 990.0, []),
        (1801.0, 1800.0, ["never-ready:total"]),
    ],
)
def test_never_ready_by_silence_or_in_total(age, side, keys):
    """A start is judged by its silence (600 s) and as a whole (30 min)."""
    facts_ = engine(State.STARTING, started=T0, side_progress_ns=ns(T0 + side))
    snap = snapshot(T0 + age, [], engine=facts_, procs=[facts()], processes=[])
    assert [f.key for f in judge(snap) if f.level is Level.OVER] == keys


def test_never_ready_names_the_loader_not_its_waiter():
    """The oldest phase that waits for nobody holds the start up."""
    lanes = [
        lane("main", frame("load", LaneClass.WAIT, at=T0), role="core", pid=101),
        lane("main", frame("load_model", LaneClass.START, at=T0 + 5)),
    ]
    procs = [process("core", pid=101, ready=False), process(ready=False)]
    facts_ = engine(State.STARTING, started=T0)
    found = judge(snapshot(T0 + 700, lanes, processes=procs, engine=facts_))
    never = next(f for f in found if f.rule is Rule.NEVER_READY)
    assert never.subject.lane == "worker:0/main"


def test_an_unreadable_board_leaves_the_processes_judged():
    """Without an image no lane is judged, but exits, stops and the start are."""
    snap = snapshot(
        T0 + 700,
        procs=[facts(100), facts(101, state="T")],
        engine=engine(State.STARTING, started=T0),
        image=None,
        recall=Recall(stopped_since_ns={101: ns(T0)}),
    )
    assert {f.rule for f in judge(snap)} == {Rule.PROCESS_STOPPED, Rule.NEVER_READY}


# -- pending ------------------------------------------------------------------------------------


def pending(age: float, *, waiting: int = 1, since: float | None = T0, **fields) -> Snapshot:
    lanes = [lane("loop", frame("loop", at=T0 + age), role="core", work=7)]
    recall = Recall(steps=1000, stuck_since_ns=None if since is None else ns(since))
    procs = [process("core", pending=waiting)]
    return snapshot(T0 + age, lanes, processes=procs, recall=recall, **fields)


def test_ticking_is_not_progress():
    """Trap 8, K05: a loop that turns while pending work does not move is found."""
    assert rules(pending(121)) == [(Rule.NO_PROGRESS.value, "over")]


def test_nothing_pending_is_no_stall():
    """F2: nothing moves, nothing waits: that is idleness."""
    assert judge(pending(1e6, waiting=0)) == ()
    assert judge(pending(1e6, since=None)) == ()


def test_all_idle_with_work_pending_is_found():
    """K04: all lanes idle and a request unanswered is a lost wake-up, not rest."""
    snap = snapshot(
        T0 + 121,
        [lane("model")],
        processes=[process(pending=1)],
        recall=Recall(steps=9, stuck_since_ns=ns(T0)),
    )
    assert rules(snap) == [(Rule.NO_PROGRESS.value, "over")]


def test_a_longer_phase_limit_is_not_undercut():
    """An operator who allows a step 300 s gets 300 s, pending work or not."""
    snap = snapshot(
        T0 + 200,
        [lane("model", frame(at=T0))],
        processes=[process(pending=1)],
        recall=Recall(steps=9, stuck_since_ns=ns(T0)),
    )
    found = judge(snap, Policy(phases={"execute_model": ns(300)}))
    assert {f.level for f in found} == {Level.WARN}


# -- exits, threads, stops ----------------------------------------------------------------------


def gone(**fields) -> Exit:
    values = {"pid": 100, "start_ticks": 1, "at_ns": ns(T0), "root": False, "status": 0}
    return Exit(**{**values, **fields})


def test_any_exit_nobody_asked_for_is_found_status_zero_included():
    """Trap 10, F9: a worker that ends with status 0 has failed."""
    snap = snapshot(T0 + 1, [], processes=[process()], procs=[], exits=(gone(),))
    found = judge(snap)
    assert [(f.rule, f.subject.process) for f in found] == [(Rule.PROCESS_GONE, "worker:0")]
    assert found[0].notes == ("exit status 0",)


@pytest.mark.parametrize(
    ("exit_", "processes", "found"),
    [
        (gone(root=True), [], True),
        (gone(root=True, expected=True), [], False),
        (gone(), [], False),
        (gone(), [process(detached=True)], False),
        (gone(expected=True), [process()], False),
        (gone(start_ticks=2), [process()], False),
    ],
)
def test_which_exits_count(exit_, processes, found):
    """The root and attached members count; helpers, farewells and asked-for exits do not."""
    snap = snapshot(T0 + 1, [], processes=processes, procs=[], exits=(exit_,))
    assert bool(judge(snap)) is found


def test_an_exit_counts_after_its_slot_was_reused_or_its_board_is_unreadable():
    """What attached once is remembered."""
    recall = Recall(attached={100: process()})
    snap = snapshot(T0 + 1, [], processes=[], procs=[], exits=(gone(),), recall=recall)
    assert rules(snap) == [(Rule.PROCESS_GONE.value, "over")]
    assert rules(replace(snap, image=None)) == [(Rule.PROCESS_GONE.value, "over")]


def thread(cls: LaneClass = LaneClass.WORK, **fields) -> Snapshot:
    one = lane("output", frame("send", cls, at=T0), tid=105, **fields)
    return snapshot(T0 + 1, [one], procs=[facts(100, tids=frozenset({100}))])


def test_a_missing_thread_is_found_at_once():
    """K09: the lane's thread is not among its process's threads."""
    assert rules(thread()) == [(Rule.THREAD_GONE.value, "over")]


def test_which_missing_threads_do_not_count():
    """Channels have no thread, closed lanes need none, and a retired pool thread is no loss."""
    assert judge(thread(channel=True)) == ()
    assert judge(thread(closed=True)) == ()
    assert judge(thread(LaneClass.IDLE)) == ()
    unknown = replace(thread(), processes={100: facts(100, tids=None)})
    assert judge(unknown) == ()


def test_a_thread_that_died_idle_counts_once_work_waits_for_it():
    """An exception unwinds the phase to idle: with work pending and flat it is a loss."""
    snap = thread(LaneClass.IDLE)
    snap = replace(snap, image=replace(snap.image, processes=(process(pending=2),)))
    for since, expected in ((T0 - 3.9, []), (T0 - 4, [(Rule.THREAD_GONE.value, "over")])):
        recall = Recall(steps=9, stuck_since_ns=ns(since))
        assert rules(replace(snap, recall=recall)) == expected


@pytest.mark.parametrize(
    ("state", "tracer", "count"), [("T", 0, 1), ("T", 7, 0), ("t", 7, 0), ("S", 0, 0)]
)
def test_stopped_means_state_t_and_no_tracer(state, tracer, count):
    """K23: SIGSTOP is found; a debugger's stop is not."""
    snap = snapshot(
        T0 + 1,
        procs=[facts(100, state=state, tracer_pid=tracer)],
        processes=[process()],
        recall=Recall(stopped_since_ns={100: ns(T0)}),
    )
    assert len(judge(snap)) == count


def test_stopped_for_less_than_half_a_second_only_warns():
    """Two looks half a second apart are needed."""
    snap = snapshot(
        T0 + 0.4, procs=[facts(100, state="T")], recall=Recall(stopped_since_ns={100: ns(T0)})
    )
    assert rules(snap) == [(Rule.PROCESS_STOPPED.value, "warn")]


# -- pauses -------------------------------------------------------------------------------------


def paused(age: float, policy: Policy = POLICY, *, seconds: float = 300.0) -> list[tuple[str, str]]:
    lanes = [
        lane("model", frame(at=T0)),
        lane(
            "main",
            frame("rpc", LaneClass.WAIT, at=T0),
            role="core",
            pid=101,
            wait_on="worker:0/model",
        ),
        lane(
            "loop", frame("out", LaneClass.WAIT, at=T0), role="api", pid=102, wait_on="core:0/main"
        ),
        lane("model", frame(at=T0 + age), rank=1, pid=103),
    ]
    processes = [
        process(pause=lease(seconds=seconds)),
        process("core", pid=101),
        process("api", pid=102),
        process(rank=1, pid=103),
    ]
    # What the watch remembers: the time of the lease does not count against the paused lane.
    resting = {lanes[0].slot: ((ns(T0), ns(T0 + min(age, seconds, 4 * 3600))),)}
    snap = snapshot(T0 + age, lanes, processes=processes, recall=Recall(steps=99, excused=resting))
    return rules(snap, policy)


def test_a_lease_suspends_its_process_and_whoever_waits_for_it():
    """F4: a planned pause is no stall, neither for the paused nor along the chain of waiters."""
    assert paused(299) == []


def test_after_the_lease_one_finding_speaks():
    """F4: just past a lease's end PAUSE_EXPIRED and nothing else: one cause, one finding."""
    assert paused(301) == [(Rule.PAUSE_EXPIRED.value, "over")]


def test_a_lease_that_nobody_ends_is_no_mute():
    """F4: a lane at work that stands for a whole limit after the lease's end is late; waiters are not."""
    assert sorted(paused(300 + 61)) == sorted(
        [(Rule.PAUSE_EXPIRED.value, "over"), (Rule.PHASE_OVER_LIMIT.value, "over")]
    )


def test_an_absurd_lease_ends_at_the_cap():
    """A lease of a million seconds does not switch the net off."""
    assert paused(4 * 3600 + 1, seconds=1e6) == [(Rule.PAUSE_EXPIRED.value, "over")]


def test_other_lanes_are_judged_during_a_pause():
    """Only the paused process and its waiters are excused."""
    lanes = [lane("model", frame(at=T0)), lane("model", frame(at=T0), rank=1, pid=101)]
    processes = [process(pause=lease(seconds=300)), process(rank=1, pid=101)]
    found = judge(snapshot(T0 + 61, lanes, processes=processes))
    assert [f.subject.lane for f in found] == ["worker:1/model"]


def test_excused_time_does_not_count():
    """F4, F12: after a pause or a debugger only the rest of the phase's time counts."""
    one = lane("model", frame(at=T0))
    recall = Recall(steps=9, excused={one.slot: ((ns(T0 + 10), ns(T0 + 100)),)})
    snap = snapshot(T0 + 119, [one], recall=recall)
    assert judge(snap) == ()
    late = evaluate(snap, ns(T0 + 150), POLICY)
    assert (late[0].elapsed_ns, late[0].level) == (ns(60), Level.OVER)


# -- stopping -----------------------------------------------------------------------------------


def test_shutdown_hangs_when_members_outlive_the_grace():
    """K18: asked to stop, and after the grace somebody lives."""
    facts_ = engine(State.STOPPING, stop_asked_ns=ns(T0), stop_grace_ns=ns(30))
    snap = snapshot(T0 + 31, [lane("model", frame(at=T0 - 500))], engine=facts_)
    assert rules(snap) == [(Rule.SHUTDOWN_HANG.value, "over")]
    assert rules(replace(snap, processes={})) == []


@pytest.mark.parametrize(
    "state",
    [
        s
        for s in State
        if s not in {State.STARTING, State.READY, State.SUSPECT, State.STALLED, State.DRAINING}
    ],
)
def test_nothing_is_judged_while_an_engine_is_down_or_being_ended(state):
    """Members end by the dozen during a kill: that is no news."""
    snap = snapshot(
        T0 + 500, [lane("model", frame(at=T0))], engine=engine(state), exits=(gone(root=True),)
    )
    assert judge(snap) == ()
