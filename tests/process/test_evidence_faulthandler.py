"""The faulthandler rung: a signal only where it is safe, a file only where it is ours."""

from __future__ import annotations

import dataclasses
import os
import signal

import pytest

from evidence_targets import process, target_of, wait_state
from stallwatch.evidence import faulthandler
from stallwatch.evidence.model import Target

pytestmark = [pytest.mark.process, pytest.mark.slow]


def test_a_dump_names_every_thread(tmp_path):
    """All threads of the process come back, the process lives on, and only new text is read."""
    (tmp_path / "dump").write_text(
        'Thread 0x1 (most recent call first):\n  File "o", line 1 in old\n'
    )
    with process("dumpable", str(tmp_path)) as child:
        found = target_of(child, run=tmp_path)
        for _ in range(2):
            dumped = faulthandler.dump(found, tmp_path, deadline_s=5)
            tops = {frame.name for thread in dumped.threads for frame in thread.frames}
            assert len(dumped.threads) == 2
            assert {"wait_for_work", "wait"} <= tops
            assert "old" not in tops
        wait_state(child.pid, "S")


def test_no_signal_without_a_handler(tmp_path):
    """A declared signal that /proc does not show as caught is not sent: it could kill."""
    (tmp_path / "dump").touch()
    with process("idle") as child:
        found = target_of(child, run=tmp_path)
        deadly = dataclasses.replace(found, dump_signal=int(signal.SIGUSR2))
        assert (
            "no handler for signal 12" in faulthandler.dump(deadly, tmp_path, deadline_s=1).problem
        )
        wait_state(child.pid, "S")


def test_no_signal_to_a_stopped_process(tmp_path):
    """A stopped process cannot run its handler; a signal now would only wait there."""
    with process("dumpable", str(tmp_path), state="T") as child:
        found = target_of(child, run=tmp_path)
        assert "in state T" in faulthandler.dump(found, tmp_path, deadline_s=1).problem


def test_nothing_is_sent_to_a_reused_pid(tmp_path):
    """The declaration counts for one pid and start time only."""
    with process("dumpable", str(tmp_path)) as child:
        found = target_of(child, run=tmp_path)
        wrong = dataclasses.replace(found, start_ticks=found.start_ticks + 1)
        assert faulthandler.dump(wrong, tmp_path, deadline_s=1).problem == "the process is gone"
        assert (tmp_path / "dump").stat().st_size == 0


@pytest.mark.parametrize("trick", ["symlink", "fifo", "folder", "outside", "dotdot", "folder-link"])
def test_a_file_that_a_worker_could_aim_elsewhere_is_refused(tmp_path, trick):
    """Links, pipes, folders and paths outside the run folder are refused, and no signal is sent."""
    run = tmp_path / "run"
    run.mkdir()
    with process("dumpable", str(tmp_path)) as child:
        found = dataclasses.replace(target_of(child, run=run), dump_path=str(run / "x"))
        if trick == "symlink":
            (run / "x").symlink_to(tmp_path / "dump")
        elif trick == "fifo":
            os.mkfifo(run / "x")
        elif trick == "folder":
            (run / "x").mkdir()
        elif trick == "outside":
            found = dataclasses.replace(found, dump_path=str(tmp_path / "dump"))
        elif trick == "dotdot":
            found = dataclasses.replace(found, dump_path="../dump")
        else:
            (run / "x").symlink_to(tmp_path)
            found = dataclasses.replace(found, dump_path="x/dump")
        dumped = faulthandler.dump(found, run, deadline_s=1)
        assert "is refused" in dumped.problem
        assert (tmp_path / "dump").stat().st_size == 0


def test_a_foreign_file_is_refused(tmp_path):
    """A file of another user than ours or the target's is not read."""
    with process("dumpable", str(tmp_path)) as child:
        os.chown(tmp_path / "dump", 12345, 12345)
        found = target_of(child, run=tmp_path)
        assert (
            "no regular file of the engine's user"
            in faulthandler.dump(found, tmp_path, deadline_s=1).problem
        )


def test_without_a_declaration_nothing_is_tried(tmp_path):
    """No declared signal, no file, no run folder: said, not guessed."""
    with process("dumpable", str(tmp_path)) as child:
        bare = target_of(child)
        assert "declared no" in faulthandler.dump(bare, tmp_path, deadline_s=1).problem
        full = target_of(child, run=tmp_path)
        assert "run folder is not known" in faulthandler.dump(full, None, deadline_s=1).problem
        assert faulthandler.dump(Target(1, 0), None, deadline_s=1).threads == ()


def test_an_endless_dump_is_cut(tmp_path):
    """A file that grows without end costs at most MAX_BYTES and the threads that fit in it."""
    path = tmp_path / "big"
    path.write_bytes(b'Thread 0xabc (most recent call first):\n  File "a", line 1 in f\n' * 40000)
    fd = os.open(path, os.O_RDONLY)
    try:
        text = faulthandler._grown(fd, 0, until=0.0)
        assert text == ""
        text = faulthandler._grown(fd, 1, until=float("inf"))
    finally:
        os.close(fd)
    assert len(text) == faulthandler.MAX_BYTES
    assert len(faulthandler.parse(text)) == faulthandler.MAX_THREADS
