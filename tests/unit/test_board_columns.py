"""Lanes taken over as columns are what they are when each is read on its own."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heartbeat_helpers import attach, folder_in, look, no_sleep, only_lane, poke
from stallwatch.board.glance import Glance
from stallwatch.board.image import BoardImage
from stallwatch.board.reader import BoardReader
from stallwatch.board.seen import SeenBoard, lane_at, survey
from stallwatch.heartbeat import layout

FRAME0 = layout.lane_offset(8, 0) + layout.L_FRAMES * 8
LANES = 6
DEEDS = ("beat", "work", "enter", "text", "push", "pop", "idle", "close", "rest")


def act(board, lane, deed, step):
    """One thing that a writer does."""
    if deed == "beat":
        lane.enter("step", n=step)
    elif deed == "work":
        lane.progress(1)
    elif deed == "enter":
        lane.enter(f"phase{step % 3}", limit=1.0 + step % 2, a=step, b=1)
    elif deed == "text":
        lane.enter("load", text=f"shard {step}")
    elif deed == "push":
        lane.pusher("inner", "n")(step)
    elif deed == "pop":
        lane.pop()
    elif deed == "idle":
        lane.idle()
    elif deed == "close":
        lane.close()
        return board.channel(lane.name if hasattr(lane, "name") else "again")
    return lane


def plain(image):
    """Everything but the beats, which count looks."""
    return [replace(lane, beats=0) for lane in image.lanes]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, LANES - 1), st.sampled_from(DEEDS)), max_size=8),
        min_size=2,
        max_size=8,
    )
)
def test_many_looks_see_what_a_first_look_sees(tmp_path_factory, looks):
    """Whatever lanes do between looks, an old reader's lanes are those of a new reader."""
    with folder_in(tmp_path_factory.mktemp("board")) as folder:
        board = attach(folder)
        lanes = [board.channel(f"c{n}") for n in range(LANES)]
        old = BoardReader(folder.path, sleep=no_sleep)
        step = 0
        for deeds in looks:
            for place, deed in deeds:
                step += 1
                lanes[place] = act(board, lanes[place], deed, step)
            new = BoardReader(folder.path, sleep=no_sleep)
            seen = look(old)
            assert plain(seen) == plain(look(new))
            new.close()
            told = survey(seen)
            glances = [Glance.of(lane) for lane in seen.lanes]
            assert list(told.works) == [g.work for g in glances]
            assert list(told.oldest) == [g.oldest for g in glances]
            assert [o.address for o in told.lineup.outlines] == [x.address for x in seen.lanes]
            assert [lane_at(seen, n) for n in range(len(glances))] == list(seen.lanes)
        old.close()
        board.close()


@pytest.fixture
def folder(tmp_path):
    with folder_in(tmp_path) as folder:
        yield folder


def test_a_lane_that_only_beats_keeps_its_line_up(folder):
    """What follows from phases is worked out again when one changes, and only then."""
    board = attach(folder)
    lane = board.channel("c")
    mark, other = lane.marker("step", "n"), lane.marker("other", "n")
    reader = BoardReader(folder.path, sleep=no_sleep)
    mark(1)
    first = survey(look(reader))
    mark(2)
    second = survey(look(reader))
    other(3)
    third = survey(look(reader))
    assert second.lineup is first.lineup
    assert second.moved == (True,)
    assert third.lineup is not second.lineup
    reader.close()
    board.close()


def test_a_lane_written_in_the_gap_is_left_for_the_next_look(folder):
    """Quiet until the first reading and written before the second: old values now, new ones next."""
    board = attach(folder)
    quiet, busy = board.channel("quiet"), board.channel("busy")
    quiet.enter("a")
    gap = [lambda: None]
    reader = BoardReader(folder.path, sleep=lambda _: gap[0]())
    before = look(reader).lane("worker:0/quiet")
    busy.enter("x")
    gap[0] = lambda: quiet.enter("b")
    seen = look(reader)
    assert seen.lane("worker:0/quiet") == before
    assert survey(seen).oldest[0] == before.phase.entered_ns
    gap[0] = lambda: None
    after = look(reader).lane("worker:0/quiet")
    assert (after.phase.name, after.beats) == ("b", before.beats + 1)
    reader.close()
    board.close()


def test_a_seen_board_can_be_copied_with_changes(folder):
    """replace() of what the reader returns gives an image with the lanes it is told."""
    board = attach(folder)
    board.channel("c").enter("x")
    reader = BoardReader(folder.path, sleep=no_sleep)
    seen = look(reader)
    fewer = replace(seen, lanes=())
    assert isinstance(seen, SeenBoard)
    assert (survey(fewer).works, fewer.lanes) == ((), ())
    same = replace(seen, taken_ns=1)
    assert (same.lanes, same.taken_ns) == (seen.lanes, 1)
    assert survey(BoardImage(1, 1, lanes=seen.lanes)).oldest == survey(seen).oldest
    reader.close()
    board.close()


@pytest.fixture
def beaten(folder):
    """A lane that was taken over by its columns at two looks: (its mark, the reader)."""
    board = attach(folder)
    mark = board.channel("c").marker("step", "n")
    reader = BoardReader(folder.path, sleep=no_sleep)
    for n in range(3):
        mark(n)
        look(reader)
    yield mark, reader
    reader.close()
    board.close()


def test_a_half_written_beat_leaves_the_newest_good_copy(folder, beaten):
    """Stopped inside an update after many beats: what stays is the last of them, not the first."""
    _, reader = beaten
    good = only_lane(reader)
    poke(folder, FRAME0, bytes(8))
    assert only_lane(reader) == good
    assert only_lane(reader) == replace(good, torn=True)
    assert good.details == (("n", 2),)


def test_a_beat_from_the_future_counts_from_when_it_was_seen(folder, beaten):
    """A clock set ahead by a lane that beat before ages from the look that found it."""
    _, reader = beaten
    poke(folder, FRAME0, struct.pack("<Q", 1 << 62))
    first = look(reader)
    second = look(reader)
    assert second.taken_ns > first.taken_ns
    assert second.lanes[0].phase.entered_ns == first.taken_ns
    assert survey(second).oldest == (first.taken_ns,)


def test_a_new_limit_of_the_same_phase_counts(folder):
    """The same name entered with another limit is another line-up, and its limit is in force."""
    board = attach(folder)
    lane = board.channel("c")
    reader = BoardReader(folder.path, sleep=no_sleep)
    seen = []
    for limit in (1.0, 1.0, 2.0):
        lane.enter("x", limit=limit)
        image = look(reader)
        (level,) = survey(image).lineup.outlines[0].levels
        assert level.limit_ns == image.lanes[0].phase.limit_ns
        seen.append(level.limit_ns)
    assert seen == [10**9, 10**9, 2 * 10**9]
    reader.close()
    board.close()
