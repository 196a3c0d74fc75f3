"""The supervisor's word reaches every process, whole or not at all."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heartbeat_helpers import attach, folder_in, poke
from stallwatch.board.control import ControlWriter
from stallwatch.errors import BoardError
from stallwatch.heartbeat import Failure, layout, record

FAILURE = Failure(
    id="st-20261130T031502Z-9f2c41aa",
    engine="chat",
    incarnation=3,
    kind="DEVICE_WAIT",
    culprit="worker:0/model",
    phase="execute_model",
    elapsed_s=61.5,
    limit_s=60.0,
    action="restart",
)


@pytest.fixture
def folder(tmp_path):
    with folder_in(tmp_path) as folder:
        yield folder


@pytest.fixture
def writer(folder):
    writer = ControlWriter(folder.file)
    yield writer
    writer.close()
    writer.close()


def test_a_failure_is_declared_and_taken_back(folder, writer):
    """failure() is None, then the record, then None again; a second record replaces the first."""
    board = attach(folder)
    assert board.failure() is None
    writer.declare(FAILURE)
    assert board.failure() == FAILURE
    assert board.control() & layout.CONTROL_FAILED
    writer.declare(FAILURE._replace(kind="GIL_HELD"))
    assert board.failure().kind == "GIL_HELD"
    writer.clear()
    assert board.failure() is None
    board.close()


def test_a_stop_is_seen_beside_a_failure(folder, writer):
    """The two bits of the control word are independent."""
    board = attach(folder)
    writer.ask_stop()
    assert writer.stop_asked()
    assert board.control() == layout.CONTROL_STOP
    assert board.failure() is None
    writer.declare(FAILURE)
    assert board.control() == layout.CONTROL_STOP | layout.CONTROL_FAILED
    board.close()


def test_a_second_writer_does_not_repeat_a_sequence(folder, writer):
    """A reader that cached the first writer's record sees the second writer's."""
    board = attach(folder)
    writer.declare(FAILURE)
    assert board.failure() == FAILURE
    second = ControlWriter(folder.file)
    second.declare(FAILURE._replace(id="st-2"))
    second.close()
    assert board.failure().id == "st-2"
    board.close()


def test_a_record_in_the_middle_of_its_replacement_is_not_read(folder, writer):
    """An odd sequence, a false length or broken JSON read as no failure, never as an exception."""
    board = attach(folder)
    writer.declare(FAILURE)
    poke(folder, layout.FAILURE_SEQ, struct.pack("<Q", 3))
    assert board.failure() is None
    for sequence, length in ((4, 0), (6, 5000), (8, 1 << 63)):
        poke(folder, layout.FAILURE_SEQ, struct.pack("<QQ", sequence, length))
        assert board.failure() is None
    poke(folder, layout.FAILURE_SEQ, struct.pack("<QQ", 10, 40))
    poke(folder, layout.FAILURE_RECORD, b"[" * 40)
    assert board.failure() is None
    board.close()


def test_a_missing_board_is_an_error(tmp_path):
    """Declaring on a removed board says so."""
    with pytest.raises(BoardError, match="cannot be opened"):
        ControlWriter(tmp_path / "board")


@given(
    st.builds(
        Failure,
        id=st.just(FAILURE.id),
        engine=st.text(),
        incarnation=st.integers(0, 1 << 60),
        kind=st.text(max_size=2000),
        culprit=st.text(max_size=2000),
        phase=st.text(max_size=2000),
        elapsed_s=st.floats(0, 1e9),
        limit_s=st.floats(0, 1e9),
        action=st.text(max_size=2000),
    )
)
def test_any_record_fits_and_keeps_its_id(failure):
    """However long the texts are, the record fits in its place and comes back with its id."""
    raw = record.encode(failure)
    assert len(raw) <= layout.FAILURE_MAX
    back = record.decode(raw)
    assert back is not None
    assert (back.id, back.incarnation) == (failure.id, failure.incarnation)


@given(st.binary(max_size=layout.FAILURE_MAX))
def test_random_bytes_are_no_failure(raw):
    """Bytes that are no record decode to None."""
    assert record.decode(raw) is None
