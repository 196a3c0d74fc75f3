"""What an engine prints, on the operator's terminal: text and colours, nothing that drives it."""

from __future__ import annotations

import os
import pty
import re
import select
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallwatch.process.spool import Passthrough
from stallwatch.process.tame import tame

COLOUR = re.compile(rb"\x1b\[[0-9;:]*m")
PIECES = st.sampled_from(
    [
        b"text ", b"\n", b"\t", b"\r", b"\x1b[31m", b"\x1b[0m", b"\x1b[2J", b"\x1b]0;pwned\x07",
        b"\x1b", b"\x9b", b"\xc2\x9b31m", b"\x1bP1$r\x1b\\", b"\x07", b"\x1b[?1049h", b"\x1bc",
        "\u202e".encode(), "\u2066".encode(), "kühl 模型 ".encode(), b"\x1b[" + b"1;" * 90 + b"m",
    ]
)  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "left"),
    [
        (b"\x1b[1;31mERROR\x1b[0m done\r\n", b"\x1b[1;31mERROR\x1b[0m done\r\n"),
        (b"a\x1b[2Jb\x1b]0;title\x07c\x1b[?25ld", b"abcd"),
        (b"bell\x07 back\x08 del\x7f", b"bell back del"),
        ("ta\u202eble \u2066x".encode(), b"table x"),
        ("größe 模型\t1".encode(), "größe 模型\t1".encode()),
    ],
)
def test_colours_stay_and_control_goes(raw, left):
    """Colours, tabs, line ends and any script stay; screen, title, bell and direction do not."""
    assert tame(raw) == left


@given(st.lists(PIECES | st.binary(max_size=8), max_size=30).map(b"".join), st.integers(0, 200))
def test_no_control_survives_even_cut_in_two(data, at):
    """Chunks end anywhere: apart from colours no escape and no control byte is ever left."""
    for out in (tame(data), tame(data[:at]) + tame(data[at:])):
        rest = COLOUR.sub(b"", out)
        assert not re.search(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", rest)
        assert out.count(b"\n") == data.count(b"\n")


def test_hostile_bytes_cost_linear_time():
    """A megabyte made to defeat the pattern is done in well under a second."""
    for unit in (b"\x1b]", b"\x1b[1;", b"\x1b]" + b"x" * 4096, b"\x1b"):
        data = unit * ((1 << 20) // len(unit))
        begun = time.process_time()
        tame(data)
        assert time.process_time() - begun < 2.0


@pytest.mark.process
def test_a_terminal_gets_it_tamed_and_a_pipe_gets_it_whole():
    """The same engine output to a pseudo terminal and to a pipe."""
    raw = b"one \x1b[31mred\x1b[0m \x1b[2J\x1b]0;pwned\x07two\n"
    master, slave = pty.openpty()
    reader, writer = os.pipe()
    try:
        for fd in (slave, writer):
            out = Passthrough(fd)
            assert out.offer(raw)
            assert out.close()
        assert _read(reader) == raw
        assert _read(master) == b"one \x1b[31mred\x1b[0m two\r\n"
    finally:
        for fd in (master, slave, reader, writer):
            os.close(fd)


def _read(fd: int) -> bytes:
    assert select.select([fd], [], [], 5.0)[0], "nothing came"
    return os.read(fd, 4096)
