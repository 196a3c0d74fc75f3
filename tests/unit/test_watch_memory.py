"""What earlier looks teach: side progress, steps, stops."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stallwatch.board.image import LaneClass
from stallwatch.lifecycle.states import State
from stallwatch.testing.snapshots import T0, engine, facts, frame, lane, ns, process, snapshot
from stallwatch.watch.memory import MAX_INTERVALS, Memory, remember
from stallwatch.watch.policy import Policy
from stallwatch.watch.snapshot import ProcFacts, Snapshot

POLICY = Policy()
STARTING = engine(State.STARTING, started=T0)


def fold(*looks: Snapshot) -> Snapshot:
    memory, seen = Memory(), looks[0]
    for raw in looks:
        memory, seen = remember(memory, raw, POLICY)
    return seen


def start(at: float, *procs: ProcFacts, processes=(), **fields) -> Snapshot:
    return snapshot(at, procs=procs, processes=processes, engine=STARTING, **fields)


@pytest.mark.parametrize(
    ("change", "moved"),
    [
        ({"rss_pages": 1256}, True),
        ({"rss_pages": 1255}, False),
        ({"rss_pages": 700}, True),
        ({"read_bytes": 65536}, True),
        ({"read_bytes": 8000}, False),
        ({"written_bytes": 65536}, True),
        ({"child_ticks": 50}, True),
        ({"major_faults": 64}, True),
        ({"major_faults": 3, "minor_faults": 90000}, False),
        ({"cpu_ticks": 5000}, False),
    ],
)
def test_what_counts_as_side_progress(change, moved):
    """F1: memory, bytes and reaped children count; noise and the process's own CPU do not."""
    none = {"read_bytes": 0, "written_bytes": 0}
    seen = fold(start(T0, facts(100, **none)), start(T0 + 1, facts(100, **{**none, **change})))
    assert (seen.engine.side_progress_ns == ns(T0 + 1)) is moved


@pytest.mark.parametrize(("attached", "moved"), [(False, True), (True, False)])
def test_compiler_children_count_and_workers_do_not(attached, moved):
    """F1: CPU of a helper without lanes extends its ancestor; a spinning worker proves nothing."""
    processes = [process("core"), *([process(pid=102)] if attached else [])]
    looks = [
        start(
            T0 + t,
            facts(100),
            facts(101, ppid=100, comm="nvcc"),
            facts(102, ppid=101, cpu_ticks=int(t * 60)),
            processes=processes,
        )
        for t in (0, 1, 2)
    ]
    seen = fold(*looks)
    assert (seen.engine.pid_side_progress_ns[100] == ns(T0 + 2)) is moved
    assert (seen.engine.side_progress_ns > 0) is moved


def test_bytes_that_nobody_had_asked_for_before_are_no_progress():
    """Bytes are read under suspicion only: the first number of a process is no growth."""
    assert fold(start(T0, facts(100)), start(T0 + 1, facts(100, read_bytes=10**9))) \
        .engine.side_progress_ns == 0  # fmt: skip


def test_a_trickle_is_no_progress():
    """Noise below the threshold in each window does not add up over the minutes."""
    looks = [start(T0 + t, facts(100, read_bytes=t * 1000)) for t in range(600)]
    assert fold(*looks).engine.side_progress_ns == 0


def test_slow_but_steady_growth_is_progress():
    """A load from slow network storage, 100 KiB/s, is never silent for long."""
    looks = [start(T0 + t, facts(100, read_bytes=t * 102400)) for t in range(600)]
    assert fold(*looks).engine.side_progress_ns == ns(T0 + 599)


def test_the_total_of_a_reaped_child_going_down_is_no_progress():
    """A helper that ends without being waited for lowers the sum: nothing moved."""
    looks = [
        start(T0, facts(100), facts(101, ppid=100, cpu_ticks=400)),
        start(T0 + 1, facts(100)),
    ]
    assert fold(*looks).engine.side_progress_ns == 0


def test_work_is_side_progress_of_its_process():
    """Shards counted by a lane keep the start alive."""
    looks = [
        snapshot(
            T0 + t,
            [lane("main", frame("load", LaneClass.START, at=T0), work=t)],
            engine=STARTING,
        )
        for t in (0, 1)
    ]
    assert fold(*looks).engine.side_progress_ns == ns(T0 + 1)


def test_steps_are_counted_since_ready():
    """Work of the start does not use up the warm-up exemption; the busiest lane counts."""
    looks = [
        snapshot(T0, [lane("model", work=500)], engine=STARTING),
        snapshot(T0 + 1, [lane("model", work=500), lane("loop", role="api", work=0)]),
        snapshot(T0 + 2, [lane("model", work=503), lane("loop", role="api", work=1)]),
    ]
    assert [fold(*looks[:n]).recall.steps for n in (1, 2, 3)] == [0, 0, 3]


def test_steps_between_ready_and_the_next_look_count_too():
    """An engine that serves at once has done its first steps before the look that knows of READY."""
    looks = [
        snapshot(T0, [lane("model", work=500)], engine=STARTING),
        snapshot(T0 + 1, [lane("model", work=508)]),
    ]
    assert fold(*looks).recall.steps == 8


def test_steps_before_the_first_look_do_not_count():
    """Who is met when it serves already has the exemption once more: what it compiled is not known."""
    assert fold(snapshot(T0, [lane("model", work=500)])).recall.steps == 0


def test_attached_processes_are_remembered_and_their_farewell_too():
    """The last image of a process stands after its slot is gone."""
    looks = [
        snapshot(T0, processes=[process()], procs=[]),
        snapshot(T0 + 1, processes=[process(detached=True)], procs=[]),
        snapshot(T0 + 2, processes=[], procs=[]),
        snapshot(T0 + 3, image=None, procs=[]),
    ]
    assert fold(*looks[:1]).recall.attached[100].detached is False
    assert fold(*looks).recall.attached[100].detached is True


def test_a_stop_begins_anew_after_a_continue():
    """Two short stops do not add up to a long one."""
    looks = [
        snapshot(T0 + t, procs=[facts(100, state=state)], processes=[])
        for t, state in ((0, "T"), (1, "S"), (2, "T"), (3, "T"))
    ]
    assert fold(*looks).recall.stopped_since_ns == {100: ns(T0 + 2)}


def test_pending_is_not_stuck_while_an_unread_lane_moves():
    """A lane too busy to be read cannot be accused of doing nothing."""
    looks = [
        snapshot(T0 + t, [lane("loop")], processes=[process(pending=1)], moving=("worker:0/loop",))
        for t in (0, 50)
    ]
    assert fold(*looks).recall.stuck_since_ns == ns(T0 + 50)


def test_work_restarts_the_clock_of_pending_work():
    """Pending since the last look at which a counter moved; a beat without work changes nothing."""
    works = {0: 4, 10: 5, 20: 5, 30: 5}
    looks = [
        snapshot(T0 + t, [lane("model", work=work, beats=t)], processes=[process(pending=1)])
        for t, work in works.items()
    ]
    assert fold(*looks).recall.stuck_since_ns == ns(T0 + 10)


def test_an_unreadable_board_keeps_the_memory():
    """One look without an image forgets neither the pending stretch nor the counters."""
    look = snapshot(T0, [lane("loop", work=4)], processes=[process(pending=1)])
    later = replace(look, now_ns=ns(T0 + 20))
    seen = fold(look, replace(look, image=None, now_ns=ns(T0 + 10)), later)
    assert seen.recall.stuck_since_ns == ns(T0)


def test_a_compile_while_serving_holds_the_pending_clock():
    """F1: shapes compile in serving too; the START phase's own limit judges that time."""
    looks = [
        snapshot(
            T0 + t,
            [lane("model", frame("compile", LaneClass.START, at=T0))],
            processes=[process(pending=1)],
        )
        for t in range(100)
    ]
    assert fold(*looks).recall.stuck_since_ns >= ns(T0 + 98)


def test_excused_intervals_are_bounded():
    """Endless pausing does not grow the memory."""
    looks = []
    for t in range(200):
        stack = (frame("serve", at=T0), *([frame("idle", LaneClass.IDLE)] if t % 2 else []))
        looks.append(snapshot(T0 + t, [lane("model", *stack)]))
    (intervals,) = fold(*looks).recall.excused.values()
    assert len(intervals) == MAX_INTERVALS


def test_answered_work_ends_the_pending_stretch():
    """F2: a queue that emptied and fills again starts a new clock."""
    looks = [
        snapshot(T0 + t, [lane("loop", work=4)], processes=[process(pending=waiting)])
        for t, waiting in ((0, 1), (10, 0), (50, 1))
    ]
    assert fold(*looks).recall.stuck_since_ns == ns(T0 + 50)


def test_a_new_incarnation_remembers_nothing():
    """Steps, pending stretches and attached processes belong to one incarnation."""
    look = snapshot(T0, [lane("loop", work=4)], processes=[process(pending=1)])
    other = snapshot(T0 + 9, [], processes=[], engine=engine(incarnation=2))
    memory, _ = remember(Memory(), look, POLICY)
    memory, seen = remember(memory, other, POLICY)
    assert (memory.incarnation, seen.recall.attached, seen.recall.stuck_since_ns) == (2, {}, None)


def test_a_helper_extends_its_nearest_attached_ancestor_only():
    """A compiler below the worker does not excuse the core above it."""
    looks = [
        start(
            T0 + t,
            facts(100),
            facts(101, ppid=100),
            facts(102, ppid=101, cpu_ticks=t * 60),
            processes=[process("core"), process(pid=101)],
        )
        for t in (0, 1)
    ]
    assert fold(*looks).engine.pid_side_progress_ns == {
        100: ns(T0),
        101: ns(T0 + 1),
        102: ns(T0),
    }
