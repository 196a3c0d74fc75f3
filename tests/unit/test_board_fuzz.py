"""Whatever is on the board, the reader neither raises nor slows down, and says nothing unprintable."""

from __future__ import annotations

import os
import random
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from heartbeat_helpers import attach, folder_in, look, no_sleep, peek, poke
from stallwatch.board.create import BoardFolder
from stallwatch.board.image import BoardImage, LaneClass
from stallwatch.board.reader import BoardReader
from stallwatch.clock import SystemClock
from stallwatch.heartbeat import layout

CLOCK = SystemClock()
SIZE = layout.total_size(8, 16)
LANES = layout.lane_offset(8, 0)
NAMES = layout.names_offset(8, 16, 0)
fuzz = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    """A valid board with two lanes in a rich state, and its bytes."""
    with folder_in(tmp_path_factory.mktemp("fuzz")) as folder:
        board = attach(folder)
        lane = board.lane("model")
        lane.enter("load", cls="start", limit=5, text="some text", on="a:0/b", shard=3, of=9)
        lane.push("inner", x=1)
        board.channel("stream").enter("kernel")
        board.pending(3)
        yield folder, peek(folder, 0, SIZE)
        board.close()


def check(image: BoardImage | None) -> None:
    """What must hold for any image, whoever wrote the board."""
    if image is None:
        return
    assert len(image.problems) <= 32
    texts = list(image.problems) + list(image.moving)
    for process in image.processes:
        assert 1 < process.pid <= 1 << 22
        assert process.pending >= 0
        assert "/" not in os.path.basename(process.dump_path)
        texts += [process.role, process.dump_path]
        if process.pause:
            texts += [process.pause.name, process.pause.owner]
    for lane in image.lanes:
        assert 1 <= len(lane.stack) <= 4
        assert 0 <= lane.tid <= 1 << 22
        texts += [lane.address, lane.text, lane.wait_on, *(name for name, _ in lane.details)]
        for frame in lane.stack:
            assert isinstance(frame.cls, LaneClass)
            assert 0 <= frame.entered_ns <= frame.progress_ns <= image.taken_ns
            assert 0 <= frame.limit_ns <= 10 * 365 * 86400 * 10**9
            texts.append(frame.name)
    assert all(text.isprintable() and len(text) <= 400 for text in texts)


def look_twice(folder: BoardFolder, data: bytes) -> None:
    poke(folder, 0, data)
    reader = BoardReader(folder.path, sleep=no_sleep)
    try:
        for _ in range(3):
            check(reader.look(CLOCK))
    finally:
        reader.close()


@fuzz
@given(st.binary(max_size=20_000))
def test_random_files(tmp_path_factory, data):
    """A file of random bytes is no board."""
    folder = BoardFolder(tmp_path_factory.mktemp("random"))
    folder.file.write_bytes(data)
    reader = BoardReader(folder.path, sleep=no_sleep)
    assert reader.look(CLOCK) is None
    reader.close()


@fuzz
@given(st.integers(0, 1 << 32), st.sampled_from([1.0, 0.5, 0.05]))
def test_random_bytes_below_a_valid_header(valid, seed, share):
    """Noise in every table, dense or sparse, is refused slot by slot."""
    folder, data = valid
    source = random.Random(seed)
    body = bytearray(data)
    if share == 1.0:
        body[layout.HEADER_SIZE :] = source.randbytes(SIZE - layout.HEADER_SIZE)
    else:
        for _ in range(int(share * 4000)):
            body[source.randrange(layout.HEADER_SIZE, SIZE)] = source.randrange(256)
    look_twice(folder, bytes(body))


regions = st.sampled_from(
    [(0, 160), (layout.HEADER_SIZE, 256), (LANES, 2 * layout.LANE_SIZE), (NAMES, 16 * 64)]
)


@fuzz
@given(regions, st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 7)), max_size=40))
def test_flipped_bits(valid, region, flips):
    """Any bits flipped in header, process, lanes or names."""
    folder, data = valid
    start, size = region
    body = bytearray(data)
    for where, bit in flips:
        body[start + where % size] ^= 1 << bit
    look_twice(folder, bytes(body))


words = st.sampled_from([0, 1, 4, 5, 1 << 31, 1 << 32, 1 << 62, 1 << 63, (1 << 64) - 1])


@fuzz
@given(st.lists(st.tuples(st.integers(0, 2 * layout.LANE_SIZE // 8 - 1), words), max_size=12))
def test_extreme_words_in_lanes(valid, stores):
    """The values at which bounds are lost, in any word of a lane."""
    folder, data = valid
    body = bytearray(data)
    for index, word in stores:
        body[LANES + index * 8 : LANES + index * 8 + 8] = word.to_bytes(8, "little")
    look_twice(folder, bytes(body))


@fuzz
@given(st.integers(0, layout.LANE_SIZE), st.integers(0, 1 << 32))
def test_a_write_cut_anywhere(valid, cut, seed):
    """A lane of which only the first bytes were replaced is never more than one lane, and whole."""
    folder, data = valid
    other = random.Random(seed).randbytes(cut)
    body = bytearray(data)
    body[LANES : LANES + cut] = other
    look_twice(folder, bytes(body))


@fuzz
@given(st.integers(0, SIZE + 1000))
def test_any_length(valid, tmp_path_factory, size):
    """A board cut or grown to any length."""
    _, data = valid
    folder = BoardFolder(tmp_path_factory.mktemp("length"))
    folder.file.write_bytes(data)
    reader = BoardReader(folder.path, sleep=lambda _: os.truncate(folder.file, size))
    check(reader.look(CLOCK))
    check(reader.look(CLOCK))
    reader.close()


@fuzz
@given(st.binary(min_size=1, max_size=55))
def test_hostile_names(valid, name):
    """A name of any bytes comes out printable."""
    folder, data = valid
    body = bytearray(data)
    for number in range(1, 32):
        start = NAMES + number * 64
        body[start + 8 : start + 9 + len(name)] = bytes([len(name)]) + name
    body[LANES + 64 : LANES + 96] = name[:32].ljust(32, b"\0")
    look_twice(folder, bytes(body))


@pytest.mark.slow
def test_noise_does_not_slow_the_reader(tmp_path):
    """A full board of changing noise costs a look a few milliseconds, not more."""
    with folder_in(tmp_path, lanes=512, processes=128) as folder:
        reader = BoardReader(folder.path, sleep=no_sleep)
        look(reader)
        source = random.Random(5)
        size = layout.total_size(128, 512) - layout.HEADER_SIZE
        costs = []
        for _ in range(10):
            poke(folder, layout.HEADER_SIZE, source.randbytes(size))
            began = time.process_time()
            check(reader.look(CLOCK))
            costs.append(time.process_time() - began)
        reader.close()
        assert sorted(costs)[5] < 0.05


@pytest.mark.slow
def test_hostile_valid_lanes_do_not_slow_the_reader(tmp_path):
    """512 lanes of one process whose words and names change at every look stay cheap."""
    with folder_in(tmp_path, lanes=512, processes=128) as folder:
        board = attach(folder)
        lanes = [board.channel(f"c{n}") for n in range(512)]
        reader = BoardReader(folder.path, sleep=no_sleep)
        look(reader)
        source = random.Random(5)
        start = layout.names_offset(128, 512, 0)
        costs = []
        for _ in range(10):
            poke(folder, start + 64, source.randbytes(255 * 64))
            for lane in lanes:
                frame = lane.cursor.top
                frame[1] = source.getrandbits(60) & ~(layout.TEXT_MASK << 6) & ~7
                frame[0] = CLOCK.monotonic_ns()
            began = time.process_time()
            check(reader.look(CLOCK))
            costs.append(time.process_time() - began)
        reader.close()
        board.close()
        assert sorted(costs)[5] < 0.05
