from __future__ import annotations

import os
import signal
import threading

import pytest

from process_helpers import subreaper
from stallwatch.process.output import OutputPump, Ring
from stallwatch.process.spool import Passthrough, RotatingFile, Spool
from stallwatch.testing import tree as trees
from stallwatch.testing.tree import tree, wait_until

pytestmark = pytest.mark.process


@pytest.fixture
def pipe():
    ends = list(os.pipe2(os.O_CLOEXEC))
    yield ends
    for fd in ends:
        if fd >= 0:
            os.close(fd)


def close(ends, index):
    os.close(ends[index])
    ends[index] = -1


def test_an_engine_is_drained_though_nobody_reads_us(pipe, tmp_path):
    """With our stderr full and unread, 100,000 lines pass; ring and file have them, drops are counted."""
    program = trees._HEAD + (
        "for n in range(100000): sys.stdout.write(f'line {n}\\n')\n"
        "sys.stdout.flush(); os.write(1, b'done'); rest()"
    )
    out = Passthrough(pipe[1], max_bytes=200_000)
    with subreaper() as reaper, tree(program, reaper=reaper) as t:
        ring = Ring()
        pump = OutputPump(
            os.dup(t.child.output), ring=ring, file=str(tmp_path / "log"), passthrough=out
        )
        wait_until(lambda: ring.tail(1) == ("done",), 30)
        os.kill(t.child.pid, signal.SIGKILL)
        t.settle(set())
        assert pump.finish()

    assert ring.total == 100000
    assert ring.tail(2) == ("line 99999", "done")
    assert pump.dropped > 0
    assert out.dropped == pump.dropped
    out.close(0.1)
    assert not [x for x in threading.enumerate() if x.name in ("engine-output", "engine-log")]


def test_the_flags_of_a_shared_terminal_stay(pipe):
    """O_NONBLOCK of our stderr's description is never set: it belongs to the shell as well."""
    out = Passthrough(pipe[1])
    out.offer(b"x\n")

    assert os.read(pipe[0], 2) == b"x\n"
    assert os.get_blocking(pipe[1])
    assert out.close()


def test_a_blocked_stderr_does_not_hold_the_end_up(pipe):
    """Closing gives up on what cannot be written within its time."""
    out = Passthrough(pipe[1], max_bytes=1 << 20)
    for _ in range(40):
        out.offer(b"y" * 16384)

    assert out.close(0.5)
    assert not [x for x in threading.enumerate() if x.name == "stderr"]


def test_a_closed_stderr_costs_lines_and_nothing_else(pipe):
    """A reader that went away: lines are counted as dropped, later ones are still tried."""
    close(pipe, 0)
    out = Passthrough(pipe[1])
    out.offer(b"lost\n")
    wait_until(lambda: out.dropped == 1)
    out.offer(b"lost\n")
    wait_until(lambda: out.dropped == 2)

    assert out.close()


def test_an_orphan_that_keeps_the_pipe_does_not_keep_us(pipe):
    """finish() ends at its deadline though a write end stays open, and has read what was there."""
    ring = Ring()
    pump = OutputPump(os.dup(pipe[0]), ring=ring)
    os.write(pipe[1], b"last words")

    assert not pump.finish(0.05)
    assert ring.tail(1) == ("last words",)


def test_the_end_of_the_pipe_ends_it(pipe):
    """When the last holder ends, everything has been read and finish() says so."""
    ring = Ring()
    pump = OutputPump(os.dup(pipe[0]), ring=ring)
    os.write(pipe[1], b"a\nb\n")
    close(pipe, 1)

    assert pump.finish()
    assert ring.tail(9) == ("a", "b")


def test_a_log_file_stays_small_and_private(tmp_path):
    """At its cap the file becomes .1 and a new one begins; only the owner may read."""
    path = tmp_path / "engine.log"
    file = RotatingFile(str(path), max_bytes=100)
    for n in range(30):
        file(b"%09d\n" % n)
    file.close()

    assert path.stat().st_size <= 100
    assert (tmp_path / "engine.log.1").stat().st_size == 100
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_bytes().endswith(b"000000029\n")
    assert sorted(os.listdir(tmp_path)) == ["engine.log", "engine.log.1"]


def test_a_slow_disk_holds_nobody_up():
    """While a write blocks, offer() returns at once, and drops beyond the bound."""
    go = threading.Event()
    spool = Spool(lambda data: go.wait(10) and None, name="slow", max_bytes=10)

    assert spool.offer(b"12345\n")
    assert not spool.offer(b"67890\n")
    assert spool.dropped == 1
    go.set()
    assert spool.close()
