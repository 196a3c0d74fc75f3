"""What a lane says is what the supervisor reads."""

from __future__ import annotations

import math
import threading
import tracemalloc

import pytest

from heartbeat_helpers import attach, folder_in, look, no_sleep, only_lane
from stallwatch.board.image import LaneClass
from stallwatch.board.reader import BoardReader

S = 10**9


@pytest.fixture
def folder(tmp_path):
    with folder_in(tmp_path) as folder:
        yield folder


@pytest.fixture
def board(folder):
    board = attach(folder)
    yield board
    board.close()


@pytest.fixture
def reader(folder):
    reader = BoardReader(folder.path, sleep=no_sleep)
    yield reader
    reader.close()


def test_a_mark_says_phase_limit_and_details(board, reader):
    """A bound mark is read back with its name, class, limit and both details."""
    board.lane("model").marker("execute_model", "step", "requests", limit=30.0)(12, -4)
    lane = only_lane(reader)
    assert lane.address == "worker:0/model"
    assert (lane.phase.name, lane.phase.cls) == ("execute_model", LaneClass.WORK)
    assert lane.phase.limit_ns == 30 * S
    assert lane.details == (("step", 12), ("requests", -4))
    assert lane.tid == threading.get_native_id()
    assert not lane.channel


def test_enter_replaces_phase_and_details(board, reader):
    """Nothing of an earlier phase shows under a later one: no details, text, limit or target."""
    lane = board.lane("model")
    lane.enter("load", cls="start", limit=5, text="shard 3", on="a:0/b", shard=3, of=9)
    seen = only_lane(reader)
    assert (seen.text, seen.wait_on, seen.phase.limit_ns) == ("shard 3", "a:0/b", 5 * S)
    assert seen.details == (("shard", 3), ("of", 9))
    assert seen.phase.cls is LaneClass.START
    lane.enter("run")
    seen = only_lane(reader)
    assert (seen.text, seen.wait_on, seen.phase.limit_ns, seen.details) == ("", "", 0, ())


def test_enter_restarts_the_clock_and_progress_restarts_it_too(board, reader):
    """enter() moves the entry time; progress() moves only the progress time and counts work."""
    lane = board.lane("model")
    lane.enter("run")
    first = only_lane(reader).phase
    lane.progress(4)
    lane.progress()
    second = only_lane(reader)
    assert second.phase.entered_ns == first.entered_ns
    assert second.phase.progress_ns > first.progress_ns
    assert second.work == 5
    lane.enter("run")
    third = only_lane(reader)
    assert third.phase.entered_ns > second.phase.progress_ns
    assert third.work == 5


def test_idle_and_wait_carry_class_and_target(board, reader):
    """idle(), wait() and their bound forms set class and wait target, with no limit on idle."""
    lane = board.lane("model")
    lane.idle()
    seen = only_lane(reader)
    assert (seen.phase.cls, seen.wait_on, seen.phase.limit_ns) == (LaneClass.IDLE, "", 0)
    lane.idle_marker(on="worker:0/ple-request")()
    assert only_lane(reader).wait_on == "worker:0/ple-request"
    lane.wait("step_result", on="worker:0/model", step=7)
    seen = only_lane(reader)
    assert (seen.phase.name, seen.phase.cls) == ("step_result", LaneClass.WAIT)
    assert seen.details == (("step", 7),)
    lane.wait_marker("answer", on="api:0/loop", limit=2)()
    seen = only_lane(reader)
    assert (seen.wait_on, seen.phase.limit_ns) == ("api:0/loop", 2 * S)


def test_the_outer_phase_keeps_its_clock_and_limit(board, reader):
    """Marks, progress and nested phases inside leave the outer phase's times untouched."""
    lane = board.lane("model")
    lane.enter("startup", cls="start", limit=600)
    outer = only_lane(reader).phase
    with lane.phase("load_weights", cls="start", limit=60, shard=1):
        lane.progress(10)
        lane.marker("load_more")()
        seen = only_lane(reader)
        assert [frame.name for frame in seen.stack] == ["startup", "load_more"]
        assert seen.stack[0] == outer
        with lane.phase("deeper"):
            assert [f.name for f in only_lane(reader).stack] == ["startup", "load_more", "deeper"]
    assert only_lane(reader).stack == (outer,)


def test_push_and_pop_nest_like_a_wrapper(board, reader):
    """A bound push enters an inner phase; pop returns to the outer one with its old clock."""
    lane = board.lane("model")
    lane.idle()
    outer = only_lane(reader).phase
    push = lane.pusher("execute_model", "step", limit=30)
    push(7)
    seen = only_lane(reader)
    assert seen.phase.name == "execute_model"
    assert seen.details == (("step", 7),)
    lane.pop()
    assert only_lane(reader).stack == (outer,)
    lane.pop()  # one too many
    assert only_lane(reader).stack == (outer,)


def test_deeper_than_four_is_counted_and_undone(board, reader):
    """Phases beyond depth 4 are counted, their marks go nowhere, and unwinding finds every level."""
    lane = board.lane("model")
    lane.enter("1")
    pushes = [lane.pusher(str(n)) for n in range(2, 8)]
    for push in pushes:
        push()
    lane.marker("lost")()
    seen = only_lane(reader)
    assert [frame.name for frame in seen.stack] == ["1", "2", "3", "4"]
    assert seen.too_deep == 3
    for expected in (4, 4, 4, 3, 2, 1):
        lane.pop()
        assert len(only_lane(reader).stack) == expected
    lane.marker("back")()
    assert only_lane(reader).phase.name == "back"


def test_an_exception_in_a_phase_unwinds_what_it_left_open(board, reader):
    """A context manager closes inner phases that an exception skipped."""
    lane = board.lane("model")
    lane.enter("outer")

    def body():
        with lane.phase("inner"):
            lane.push("left open")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        body()
    assert [frame.name for frame in only_lane(reader).stack] == ["outer"]


@pytest.mark.parametrize("limit", [math.nan, math.inf, -math.inf, 0, -1])
def test_a_limit_that_means_nothing_is_refused(board, limit):
    """NaN, infinity, zero and negative limits raise at once instead of switching the net off."""
    lane = board.lane("model")
    for call in (
        lambda: lane.marker("x", limit=limit),
        lambda: lane.pusher("x", limit=limit),
        lambda: lane.enter("x", limit=limit),
        lambda: lane.phase("x", limit=limit),
        lambda: board.pause("x", seconds=limit, owner="me"),
    ):
        with pytest.raises(ValueError, match="finite"):
            call()


def test_a_limit_of_years_is_a_long_limit(board):
    """A large number is what it says, cut to what the board can hold; it never raises in an engine."""
    board.lane("model").enter("x", limit=1e9)
    board.pause("x", seconds=1e300, owner="me")


def test_an_unknown_class_is_refused(board):
    """A class that the ABI does not know raises and names those it does."""
    with pytest.raises(ValueError, match="idle, work"):
        board.lane("model").enter("x", cls="wrok")


class Odd:
    """An integer-like value whose conversion runs Python code."""

    def __init__(self, board_lane, reader):
        self.lane, self.reader, self.seen = board_lane, reader, None

    def __index__(self):
        self.seen = only_lane(self.reader)
        return 5


def test_a_detail_is_converted_before_the_update_begins(board, reader):
    """A tensor-like detail (its __index__ may wait for a device) never leaves a lane half-written."""
    lane = board.lane("model")
    lane.enter("before")
    for bind in (lane.marker, lane.pusher):
        odd = Odd(lane, reader)
        bind("after", "a", "b")(1, odd)
        assert odd.seen is not None
        assert not odd.seen.torn
        assert only_lane(reader).details == (("a", 1), ("b", 5))


@pytest.mark.parametrize("value", [1 << 63, -(1 << 70), 1 << 200, None, "x", 1.5, object()])
def test_a_detail_that_is_no_small_int_never_raises(board, reader, value):
    """Details beyond 64 bits are clamped, nonsense reads 0, and the lane stays whole."""
    lane = board.lane("model")
    for bind in (lane.marker, lane.pusher):
        bind("x", "a", "b")(value, 3)
        seen = only_lane(reader)
        assert not seen.torn
        assert seen.phase.name == "x"
        assert seen.details[1] == ("b", 3)
    lane.enter("y", a=value)
    assert only_lane(reader).phase.name == "y"
    lane.progress(value)
    board.pending(value)
    look(reader)


def test_names_are_bounded(board, reader):
    """A caller that makes up names fills its table, is read as (other), and breaks nobody."""
    lane = board.lane("model")
    for n in range(2000):
        lane.enter(f"phase-{n}", limit=n + 1)
    assert only_lane(reader).phase.name == "(other)"
    assert only_lane(reader).phase.limit_ns == 2000 * S
    lane.enter("phase-3")
    assert only_lane(reader).phase.name == "phase-3"


def test_long_and_hostile_names_are_cut_and_cleaned(board, reader):
    """Names are cut at whole characters and carry nothing that a terminal would obey."""
    lane = board.lane("\x1b[31mred" + "é" * 60)
    lane.enter("p" * 500, text="t\x00\x07" + "€" * 200)
    seen = only_lane(reader)
    assert seen.name.startswith("?[31mred")
    assert len(seen.name.encode()) <= 32
    assert seen.phase.name == "p" * 55
    assert seen.text == "t"


def test_a_text_belongs_to_the_newest_phase_that_has_one(board, reader):
    """An inner text replaces the outer one and goes with its phase."""
    lane = board.lane("model")
    lane.enter("outer", text="outer text")
    with lane.phase("inner"):
        assert only_lane(reader).text == "outer text"
    with lane.phase("inner", text="inner"):
        assert only_lane(reader).text == "inner"
    assert only_lane(reader).text == ""


def test_a_channel_has_no_thread(board, reader):
    """A channel is a lane of a device queue: no thread id, its own flag."""
    board.channel("stream/model").enter("kernel")
    seen = only_lane(reader)
    assert (seen.channel, seen.tid) == (True, 0)


def test_asking_again_gives_the_same_lane_and_another_thread_its_own(board, reader):
    """One lane per name and thread."""
    lane = board.lane("model")
    assert board.lane("model") is lane
    others = []
    thread = threading.Thread(target=lambda: others.append(board.lane("model")))
    thread.start()
    thread.join(10)
    assert others[0] is not lane
    assert len(look(reader).lanes) == 2


def test_a_late_lane_takes_its_slot_at_the_first_mark(board, reader):
    """A late lane is invisible until its first mark, and then belongs to the marking thread."""
    lane = board.lane("output", late=True)
    mark = lane.marker("copy", "step")
    assert look(reader).lanes == ()
    tids = []
    thread = threading.Thread(target=lambda: (mark(3), tids.append(threading.get_native_id())))
    thread.start()
    thread.join(10)
    seen = only_lane(reader)
    assert (seen.tid, seen.phase.name, seen.details) == (tids[0], "copy", (("step", 3),))


def test_closing_a_lane_ends_it_and_frees_its_slot(board, reader, folder):
    """A closed lane is marked closed, later marks say nothing, and its slot is used again."""
    lane = board.lane("model")
    mark = lane.marker("x")
    lane.close()
    lane.close()
    mark()
    assert only_lane(reader).closed
    assert only_lane(reader).phase.name == "attached"
    board.lane("second")
    seen = only_lane(reader)
    assert (seen.name, seen.slot, seen.closed) == ("second", 0, False)


def test_a_full_table_gives_silent_lanes(folder, reader):
    """The lane that finds no slot works and says nothing."""
    board = attach(folder)
    lanes = [board.channel(f"c{n}") for n in range(20)]
    for lane in lanes:
        lane.enter("x")
        lane.progress()
        lane.close()
    assert len(look(reader).lanes) == 16
    board.close()


def test_marks_keep_no_memory(board):
    """A hundred thousand marks leave not one allocation behind."""
    lane = board.lane("model")
    mark, push, pop = lane.marker("x", "a", "b"), lane.pusher("y", "a"), lane.pop

    def some() -> None:
        for n in range(1000):
            mark(n, 1 << 40)
            push(n)
            lane.progress(1)
            pop()
            lane.enter("load", shard=n)

    some()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        some()
        assert tracemalloc.get_traced_memory()[0] - before < 2000
    finally:
        tracemalloc.stop()


def test_ready_pending_and_pause_are_read_back(board, reader):
    """The process slot carries readiness, the pending gauge and the lease in force."""
    (process,) = look(reader).processes
    assert (process.address, process.ready, process.pending) == ("worker:0", False, 0)
    board.pending(17)
    board.ready()
    with board.pause("weight_update", seconds=120, owner="trainer"):
        with board.pause("inner", seconds=5, owner="me"):
            assert look(reader).processes[0].pause.name == "inner"
        (process,) = look(reader).processes
        assert (process.ready, process.pending) == (True, 17)
        assert (process.pause.name, process.pause.owner) == ("weight_update", "trainer")
        assert process.pause.until_ns - process.pause.entered_ns == 120 * S
    assert look(reader).processes[0].pause is None


def test_close_says_goodbye(board, reader):
    """After close() the process is read as detached and its lanes as closed."""
    lane = board.lane("model")
    board.close()
    board.close()
    lane.enter("x")
    image = look(reader)
    assert image.processes[0].detached
    assert image.lanes[0].closed
