"""A board, a reader and writers for tests, all of one process or of many."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stallwatch.board.create import BoardFolder
from stallwatch.board.image import BoardImage, LaneImage
from stallwatch.board.reader import BoardReader
from stallwatch.clock import SystemClock
from stallwatch.heartbeat import Board
from stallwatch.heartbeat.memory import open_board

CLOCK = SystemClock()


@contextmanager
def folder_in(parent: Path, **sizes: int) -> Iterator[BoardFolder]:
    """A small board in `parent`, removed at the end."""
    sizes = {"lanes": 16, "processes": 8, **sizes}
    folder = BoardFolder.create(parent, engine="test", incarnation=3, **sizes)
    try:
        yield folder
    finally:
        folder.remove()


def attach(folder: BoardFolder, role: object = "worker", rank: int = 0) -> Board:
    """A board of this test process, without the process-wide cache and signal."""
    return Board(open_board(str(folder.path)), role, rank, 0)


def look(reader: BoardReader) -> BoardImage:
    image = reader.look(CLOCK)
    assert image is not None
    return image


def only_lane(reader: BoardReader) -> LaneImage:
    (lane,) = look(reader).lanes
    return lane


def no_sleep(_: float) -> None:
    """The gap between two reads, when nothing writes meanwhile."""


def poke(folder: BoardFolder, offset: int, data: bytes) -> None:
    """Write into the board file behind everybody's back."""
    fd = os.open(folder.file, os.O_RDWR)
    try:
        os.pwrite(fd, data, offset)
    finally:
        os.close(fd)


def peek(folder: BoardFolder, offset: int, size: int) -> bytes:
    """Read from the board file."""
    fd = os.open(folder.file, os.O_RDONLY)
    try:
        return os.pread(fd, size, offset)
    finally:
        os.close(fd)


def start_python(
    code: str, folder: BoardFolder, *args: str, interpreter: str = sys.executable
) -> subprocess.Popen[str]:
    """Run code in a new interpreter with the board in its environment; talk by its pipes."""
    return subprocess.Popen(
        [interpreter, "-c", textwrap.dedent(code), *args],
        env={**os.environ, **folder.environment()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@contextmanager
def python(code: str, folder: BoardFolder, *args: str) -> Iterator[subprocess.Popen[str]]:
    """The same, killed and reaped at the end."""
    child = start_python(code, folder, *args)
    try:
        yield child
    finally:
        try:
            os.killpg(child.pid, signal.SIGKILL)  # what it forked, too
        except ProcessLookupError:
            pass
        child.communicate(timeout=10)
