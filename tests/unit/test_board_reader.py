"""Torn, moving, reused, truncated: what the reader makes of each."""

from __future__ import annotations

import os
import struct

import pytest

from heartbeat_helpers import CLOCK, attach, folder_in, look, no_sleep, only_lane, peek, poke
from stallwatch.board.decode import _Frame, _Image
from stallwatch.board.image import LaneImage, PhaseFrame
from stallwatch.board.reader import BoardReader
from stallwatch.heartbeat import layout
from stallwatch.testing.clock import FakeClock

FRAME0 = layout.L_FRAMES * 8


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


def lane_at(slot: int) -> int:
    return layout.lane_offset(8, slot)


def test_an_empty_board_is_read(folder, reader):
    """A new board has its incarnation and nobody on it."""
    image = look(reader)
    assert (image.incarnation, image.processes, image.lanes, image.problems) == (3, (), (), ())


def test_a_quiet_board_costs_no_gap(board, folder):
    """The second look at an unchanged board sleeps not at all and only takes a new time."""
    naps = []
    reader = BoardReader(folder.path, sleep=naps.append)
    board.lane("model").enter("x")
    look(reader)
    look(reader)
    naps.clear()
    first, second = look(reader), look(reader)
    assert naps == []
    assert first.lanes == second.lanes
    assert second.taken_ns > first.taken_ns
    reader.close()


def test_a_change_is_seen_at_the_next_look(board, reader):
    """Settled lanes are decoded anew when their bytes change, and beats count it."""
    lane = board.lane("model")
    lane.enter("a")
    first = only_lane(reader)
    lane.enter("b")
    second = only_lane(reader)
    assert (first.phase.name, second.phase.name) == ("a", "b")
    assert second.beats > first.beats
    assert only_lane(reader).beats == second.beats


def test_a_lane_that_never_holds_still_is_moving(board, folder):
    """Written between all reads: moving, with a fresh inner clock and at most three reads."""
    lane = board.lane("model")
    lane.enter("outer", limit=600)
    push = lane.pusher("inner", "n")
    push(0)
    mark = lane.marker("inner", "n")
    naps = []

    def write(_):
        naps.append(1)
        mark(len(naps))

    reader = BoardReader(folder.path, sleep=write)
    image = look(reader)
    assert image.moving == ("worker:0/model",)
    assert len(naps) == 2
    (seen,) = image.lanes
    assert [frame.name for frame in seen.stack] == ["outer", "inner"]
    assert seen.phase.progress_ns == image.taken_ns
    assert seen.stack[0].progress_ns < image.taken_ns
    quiet = BoardReader(folder.path, sleep=no_sleep)
    assert look(quiet).lanes[0].stack[0] == seen.stack[0]
    reader.close()
    quiet.close()


def test_a_lane_that_stops_after_it_moved_is_read_afresh(board, folder):
    """What was shown of a moving lane is replaced by its settled bytes, true times included."""
    lane = board.lane("model")
    mark = lane.marker("step")
    gap = [mark]
    reader = BoardReader(folder.path, sleep=lambda _: gap[0]())
    moving = look(reader)
    assert moving.moving == ("worker:0/model",)
    gap[0] = lambda: None
    settled = look(reader)
    assert settled.moving == ()
    phase = settled.lanes[0].phase
    assert phase.progress_ns == phase.entered_ns < moving.taken_ns
    assert settled.lanes[0].beats > moving.lanes[0].beats
    again = look(reader)
    assert again.lanes == settled.lanes
    reader.close()


def test_a_lane_that_settles_at_the_second_try_counts(board, folder):
    """Moved once in the first gap, quiet in the second: not moving, and the newest bytes count."""
    lane = board.lane("model")
    naps = []

    def write(_):
        naps.append(1)
        if len(naps) == 1:
            lane.enter("new")

    reader = BoardReader(folder.path, sleep=write)
    image = look(reader)
    assert image.moving == ()
    assert image.lanes[0].phase.name == "new"
    reader.close()


def test_a_half_written_lane_is_torn_at_the_second_look(board, folder, reader):
    """Half-written and unchanged over two looks: the last good copy, flagged, until it moves again."""
    lane = board.lane("model")
    lane.enter("good", a=1)
    good = only_lane(reader)
    poke(folder, lane_at(0) + FRAME0, struct.pack("<QQ", 0, 0xFFFF))
    first = only_lane(reader)
    assert (first, first.torn) == (good, False)
    second = only_lane(reader)
    assert second.torn
    assert (second.stack, second.details) == (good.stack, good.details)
    assert only_lane(reader).torn
    lane.enter("moved on")
    seen = only_lane(reader)
    assert (seen.torn, seen.phase.name) == (False, "moved on")


def test_a_slot_that_was_never_whole_gives_no_lane(board, folder, reader):
    """A writer that stopped inside its first update is a problem in words, not a lane."""
    board.lane("model")
    poke(folder, lane_at(0) + FRAME0, bytes(8))
    look(reader)
    image = look(reader)
    assert image.lanes == ()
    assert "stopped before" in image.problems[0]


def test_a_reused_slot_inherits_nothing(board, folder, reader):
    """A new generation in a slot starts without the old image, half-written or not."""
    board.lane("old").enter("phase", x=1)
    assert only_lane(reader).name == "old"
    raw = bytearray(peek(folder, lane_at(0), layout.LANE_SIZE))
    raw[:8] = struct.pack("<Q", 77)
    raw[64:96] = b"new".ljust(32, b"\0")
    raw[FRAME0 : FRAME0 + 8] = bytes(8)
    poke(folder, lane_at(0), bytes(raw))
    assert look(reader).lanes == ()
    assert look(reader).lanes == ()
    raw[FRAME0 : FRAME0 + 8] = struct.pack("<Q", 5)
    poke(folder, lane_at(0), bytes(raw))
    seen = only_lane(reader)
    assert (seen.name, seen.torn, seen.beats) == ("new", False, 2)


def test_an_unclaimed_generation_clears_the_lane(board, folder, reader):
    """Generation 0 (being claimed) is nobody's lane."""
    board.lane("old")
    assert only_lane(reader).name == "old"
    poke(folder, lane_at(0), bytes(8))
    assert look(reader).lanes == ()


def test_a_lane_of_another_process_is_refused(board, folder, reader):
    """A lane whose pid is not its process slot's is a problem, not a lane."""
    board.lane("model")
    poke(folder, lane_at(0) + 8, struct.pack("<I", 1234))
    image = look(reader)
    assert image.lanes == ()
    assert image.problems == ("lane slot 0: process slot 0 is another process",)


def test_a_lane_seen_before_its_process_is_read_later(board, folder, reader):
    """A lane whose process slot is not whole yet appears as soon as it is."""
    board.lane("model")
    start = layout.process_offset(0)
    raw = peek(folder, start, layout.PROCESS_SIZE)
    poke(folder, start, bytes(8))
    assert look(reader).lanes == ()
    poke(folder, start, raw[:8])
    assert only_lane(reader).address == "worker:0/model"


def test_times_in_the_future_are_judged_from_now(board, folder, reader):
    """An entry time beyond the clock is clamped, so that it cannot hide a lane for ever."""
    board.lane("model").enter("x")
    poke(folder, lane_at(0) + FRAME0, struct.pack("<Q", 1 << 62))
    image = look(reader)
    assert image.lanes[0].phase.entered_ns <= image.taken_ns


@pytest.mark.parametrize("depth", [0, 5, 1 << 60])
def test_a_false_depth_is_refused(board, folder, reader, depth):
    """A depth that the ABI does not know is a problem, not an index."""
    board.lane("model")
    poke(folder, lane_at(0) + layout.L_DEPTH * 8, struct.pack("<Q", depth))
    image = look(reader)
    assert image.lanes == ()
    assert "depth" in image.problems[0]


def test_a_dump_path_never_leaves_the_folder(board, folder, reader):
    """The file name in a slot cannot point elsewhere."""
    for name in (b"../../../etc/shadow", b"/etc/shadow", b"..", b".hidden"):
        start = layout.process_offset(0)
        poke(folder, start + layout.P_SIGNAL, struct.pack("<I", 23))
        poke(folder, start + layout.P_DUMP, name.ljust(layout.P_DUMP_SIZE, b"\0"))
        (process,) = look(reader).processes
        assert (process.dump_path, process.dump_signal) == ("", 0)
    poke(folder, start + layout.P_DUMP, b"12-34.txt".ljust(layout.P_DUMP_SIZE, b"\0"))
    assert look(reader).processes[0].dump_path == str(folder.path / "dumps" / "12-34.txt")


def test_a_truncated_board_is_unreadable_and_recovers(board, folder, reader):
    """Cut short between or during reads: None, no exception, and a reading again once it is back."""
    board.lane("model").enter("x")
    look(reader)
    raw = folder.file.read_bytes()
    for size in (0, 100, layout.HEADER_SIZE, len(raw) // 2):
        keep = bytes(raw)

        def cut(_, size=size):
            os.truncate(folder.file, size)

        late = BoardReader(folder.path, sleep=cut)
        board.lane("model").enter("y")
        if size < lane_at(0):
            assert late.look(CLOCK) is None
        late.close()
        fd = os.open(folder.file, os.O_RDWR)
        os.pwrite(fd, keep, 0)
        os.close(fd)
    assert look(reader).lanes[0].phase.name in {"x", "y"}


def test_a_missing_or_foreign_board_is_unreadable(tmp_path):
    """No file, a folder, a FIFO, rubbish: None at once."""
    reader = BoardReader(tmp_path)
    assert reader.look(CLOCK) is None
    os.mkfifo(tmp_path / "board")
    assert reader.look(CLOCK) is None
    os.unlink(tmp_path / "board")
    (tmp_path / "board").write_bytes(b"x" * 10_000)
    assert reader.look(CLOCK) is None
    os.unlink(tmp_path / "board")
    (tmp_path / "board").mkdir()
    assert reader.look(CLOCK) is None
    reader.close()


def test_an_overwritten_header_is_unreadable(board, folder, reader):
    """When the header changes under the reader, nothing on the board can be placed any more."""
    look(reader)
    poke(folder, 16, struct.pack("<I", 9999))
    assert reader.look(CLOCK) is None


def test_every_lane_is_found_however_many_come_between_two_looks(tmp_path):
    """The used prefix grows with the board: 300 new lanes are all seen at the next look."""
    with folder_in(tmp_path, lanes=400) as folder:
        board = attach(folder)
        reader = BoardReader(folder.path, sleep=no_sleep)
        for _ in range(3):
            assert look(reader).lanes == ()
        for n in range(300):
            board.channel(f"c{n}")
        names = {lane.name for lane in look(reader).lanes}
        assert names == {f"c{n}" for n in range(300)}
        board.close()
        reader.close()


def test_the_taken_time_is_the_injected_clock(board, reader):
    """The reader has no clock of its own."""
    clock = FakeClock(start_s=50.0)
    image = reader.look(clock)
    assert image is not None
    assert image.taken_ns == 50 * 10**9


def test_the_unfrozen_twins_have_the_slots_of_the_images():
    """Whoever adds a field to an image must add it to the class that the decoder fills."""
    assert set(_Frame.__slots__) == set(PhaseFrame.__slots__)
    assert set(_Image.__slots__) == set(LaneImage.__slots__)


def test_decoded_images_are_real_ones(board, reader):
    """An image filled before it was frozen is frozen, equal and hashable like any other."""
    board.lane("model").enter("x", a=1)
    lane = only_lane(reader)
    built = LaneImage(**{name: getattr(lane, name) for name in LaneImage.__slots__})
    assert lane == built
    assert hash(lane) == hash(built)
    assert repr(lane) == repr(built)
    with pytest.raises(AttributeError):
        lane.beats = 3
