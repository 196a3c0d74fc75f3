"""A writer stopped or killed at any instant never yields a wrong image."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from heartbeat_helpers import folder_in, look, python
from stallwatch import procfs
from stallwatch.board.reader import BoardReader

pytestmark = [pytest.mark.process, pytest.mark.slow]

# Every phase carries details that belong to it alone, so that a mixture of two updates shows.
WRITER = """
    from stallwatch import heartbeat
    lane = heartbeat.attach("worker", dump_signal=0).lane("model")
    one = lane.marker("one", "a", "b", limit=11)
    two = lane.marker("two", "c", "d", limit=22)
    push, pop = lane.pusher("inner", "e", "f", limit=33), lane.pop
    print("ready", flush=True)
    n = 0
    while True:
        n += 1
        one(n, n + 1)
        push(n, n + 5)
        lane.progress()
        pop()
        two(n, n + 2)
        lane.enter("text", text=f"n={n}" * 8, limit=44, n=n)
"""
SHAPES = {
    "attached": ((), 0, 0),
    "one": (("a", "b"), 1, 11),
    "two": (("c", "d"), 2, 22),
    "inner": (("e", "f"), 5, 33),
}


def check(lane) -> None:
    """Phase, details, limit and text belong to one and the same update."""
    name = lane.phase.name
    if name == "text":
        ((_, n),) = lane.details
        assert lane.text == f"n={n}" * 8
        assert lane.phase.limit_ns == 44 * 10**9
        return
    names, offset, limit = SHAPES[name]
    assert tuple(key for key, _ in lane.details) == names
    assert lane.phase.limit_ns == limit * 10**9
    if names:
        assert lane.details[1][1] == lane.details[0][1] + offset
    if name == "inner":
        assert len(lane.stack) == 2
        assert lane.stack[0].name == "one"


def wait_stopped(pid: int) -> None:
    deadline = time.monotonic() + 5
    while True:
        found = procfs.stat(pid)
        assert found is not None
        if found.state == "T":
            return
        assert time.monotonic() < deadline
        os.sched_yield()


def test_a_stopped_writer_is_read_whole_every_time(tmp_path):
    """200 SIGSTOPs at random instants: every settled image is one update, torn ones are flagged."""
    source = random.Random(1)
    with folder_in(tmp_path) as folder, python(WRITER, folder) as child:
        assert child.stdout.readline() == "ready\n"
        reader = BoardReader(folder.path)
        for _ in range(200):
            until = time.perf_counter() + source.random() * 0.002
            while time.perf_counter() < until:
                pass
            child.send_signal(signal.SIGSTOP)
            wait_stopped(child.pid)
            first = look(reader)
            second = look(reader)
            assert second.moving == ()
            for lane in second.lanes:
                check(lane)
            assert [lane.beats for lane in first.lanes] == [lane.beats for lane in second.lanes]
            child.send_signal(signal.SIGCONT)
        reader.close()


def test_a_killed_writer_leaves_one_whole_update(tmp_path):
    """After SIGKILL in full flight the lane is one update, or the last good copy flagged torn."""
    with folder_in(tmp_path) as folder:
        for _ in range(8):
            with python(WRITER, folder) as child:
                assert child.stdout.readline() == "ready\n"
                reader = BoardReader(folder.path)
                deadline = time.monotonic() + 20
                while not look(reader).moving:  # it is writing
                    assert time.monotonic() < deadline
                    os.sched_yield()
                child.kill()
                child.wait(10)
                look(reader)
                lanes = [lane for lane in look(reader).lanes if lane.pid == child.pid]
                assert len(lanes) == 1
                check(lanes[0])
                reader.close()


def test_a_running_writer_is_never_read_as_a_mixture(tmp_path):
    """100 looks at a lane in full flight, and those between: what is called settled is one update."""
    with folder_in(tmp_path) as folder, python(WRITER, folder) as child:
        assert child.stdout.readline() == "ready\n"
        reader = BoardReader(folder.path)
        moving = 0
        deadline = time.monotonic() + 40
        while moving < 100:
            assert time.monotonic() < deadline
            image = look(reader)
            if not image.lanes:  # not settled once so far: alive, and nothing is claimed of it
                assert image.moving
                moving += 1
            elif image.moving:
                moving += 1
                assert image.lanes[0].phase.progress_ns == image.taken_ns
            else:
                check(image.lanes[0])
        reader.close()


GIL = """
    import ctypes
    from stallwatch import heartbeat
    import threading
    lane = heartbeat.attach("worker", dump_signal=0).lane("model")
    mark = lane.marker("spin", "n")
    libc = ctypes.PyDLL(None)                  # keeps the GIL while it sleeps
    def hold():
        print("holding", flush=True)
        libc.sleep(3600)
    timer = threading.Timer(0.05, hold)
    timer.daemon = True
    timer.start()
    n = 0
    while True:
        n += 1
        mark(n, 0)
"""


def switches(pid: int) -> list[str]:
    """State and context switches of every thread: what changes as soon as one of them runs."""
    keys = ("State:", "voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:")
    tasks = sorted(Path(f"/proc/{pid}/task").iterdir())
    lines = [line for task in tasks for line in (task / "status").read_text().splitlines()]
    return [line for line in lines if line.startswith(keys)]


def all_asleep(pid: int) -> bool:
    """Two threads or more, and all slept at one and the same instant: each waits for the other, for good.

    A board that stands still is no such proof: a busy host takes the processor from a thread anywhere,
    in the middle of an update too.
    """
    before = switches(pid)
    states = [line for line in before if line.startswith("State:")]
    asleep = len(states) > 1 and all("S (sleeping)" in state for state in states)
    return asleep and switches(pid) == before


@pytest.mark.parametrize("_", range(5))
def test_a_gil_held_stall_never_freezes_a_lane_half_written(tmp_path, _):
    """A thread that loses the GIL in the middle of a mark loop loses it between two updates."""
    with folder_in(tmp_path) as folder, python(GIL, folder) as child:
        assert child.stdout.readline() == "holding\n"
        deadline = time.monotonic() + 20
        while not all_asleep(child.pid):
            assert time.monotonic() < deadline, "the GIL was never held for good"
        reader = BoardReader(folder.path)
        (lane,) = look(reader).lanes
        assert (lane.phase.name, lane.torn) == ("spin", False)
        reader.close()
