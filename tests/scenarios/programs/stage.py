"""What every scenario program needs: its seed, its other processes, ways to stand still, noise.

A program is an engine: it attaches (or does not), works for a while, and then its fault begins. Run
as `python NAME.py --seed N`; every further process is the same file with `--part NAME`.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

TICK_S = 0.02
WORKED = "SCENARIO_UP"  # private to these programs: where children say that they are up
GO = "SCENARIO_GO"  # and what they wait for then: its end of file says that all are there

_parser = argparse.ArgumentParser()
_parser.add_argument("--seed", type=int, default=0)
_parser.add_argument("--part", default="main")
_parser.add_argument("rest", nargs="*")
ARGS = _parser.parse_args()
RANDOM = random.Random(f"{ARGS.seed}/{ARGS.part}/{ARGS.rest}")


def perform(**parts: Callable[..., Any]) -> None:
    """Run the part that this process is to play."""
    parts[ARGS.part](*ARGS.rest)


_go: list[int] = []  # both ends, once there is a child


def go() -> None:
    """All processes are there: they begin to work now, together."""
    while _go:
        os.close(_go.pop())


def child(part: str, *rest: object, **options: Any) -> subprocess.Popen[bytes]:
    """Another process of this program, which has said `up()` when this returns."""
    if not _go:
        _go.extend(os.pipe())
    reader, writer = os.pipe()
    argv = [sys.executable, sys.argv[0], "--seed", str(ARGS.seed), "--part", part, "--"]
    process = subprocess.Popen(
        [*argv, *map(str, rest)],
        env={**os.environ, WORKED: str(writer), GO: str(_go[0])},
        pass_fds=(writer, _go[0], *options.pop("pass_fds", ())),
        **options,
    )
    os.close(writer)
    os.read(reader, 1)
    os.close(reader)
    return process


def up() -> None:
    """Tell the parent that this process has attached, and wait until all others have."""
    writer, start = int(os.environ.pop(WORKED)), int(os.environ.pop(GO))
    os.write(writer, b"u")
    os.close(writer)
    os.read(start, 1)
    os.close(start)


def steps(least: int = 15, most: int = 40) -> Iterator[int]:
    """Some healthy steps, each with a little time: past those that may compile."""
    for step in range(RANDOM.randint(least, most)):
        yield step
        time.sleep(RANDOM.uniform(0.5, 1.5) * TICK_S)


def block_in_c() -> None:
    """Sleep in a C call with the GIL free, as in a driver's synchronize()."""
    libc = ctypes.CDLL(None)
    semaphore = ctypes.create_string_buffer(64)
    libc.sem_init(semaphore, 0, 0)
    libc.sem_wait(semaphore)


def lock_in_c() -> None:
    """Sleep in a mutex of C, which no signal interrupts: a Python signal handler never runs."""
    libc = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def park() -> None:
    """The main thread has nothing to do."""
    while True:
        time.sleep(3600)


def noise(board: Any, count: int | None = None) -> None:
    """Threads with lanes of their own that turn, idle or poll, whatever else happens."""

    def turn(number: int, rhythm: float) -> None:
        lane = board.lane(f"aux-{number}")
        while True:
            lane.enter("poll", cls="idle")
            time.sleep(rhythm)

    for number in range(RANDOM.randint(1, 4) if count is None else count):
        thread = threading.Thread(
            target=turn, args=(number, RANDOM.uniform(0.01, 0.2)), daemon=True
        )
        thread.start()


def front_end(board: Any, *, pending: int = 2) -> None:
    """An API process from here on: its loop turns, requests are pending, it counts no work.

    Once a FAILURE is declared it answers them all.
    """
    lane = board.lane("loop")
    board.pending(pending)
    board.ready()
    go()
    while True:
        lane.enter("loop")
        time.sleep(TICK_S)
        if board.failure() is not None:
            board.pending(0)


def folder() -> str:
    """A private folder for this run, removed by whoever runs the scenario (it is below TMPDIR)."""
    return tempfile.mkdtemp(prefix="scenario-")


class Barrier:
    """A barrier of processes over a folder: each writes its arrival, and waits for all the others."""

    def __init__(self, where: str, parties: int) -> None:
        self.where, self.parties, self.round = where, parties, 0
        self.name = f"{os.getpid()}"

    def wait(self) -> None:
        """Return when `parties` processes have arrived in this round."""
        self.round += 1
        mine = os.path.join(self.where, f"{self.round}-{self.name}")
        with open(mine, "w"):
            pass
        prefix = f"{self.round}-"
        while sum(n.startswith(prefix) for n in os.listdir(self.where)) < self.parties:
            time.sleep(0.005)
