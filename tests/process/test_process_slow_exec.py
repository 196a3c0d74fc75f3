"""A program whose file system does not answer: its start waits, and nothing else does.

A write lease on the file stands in for the slow server: the kernel makes the exec's open wait until
the lease is given back.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from daemon_helpers import daemon, place, tag, until
from stallwatch.process.reaper import Reaper
from stallwatch.process.spawn import Child, SpawnSpec, end_unborn, spawn

pytestmark = [pytest.mark.process, pytest.mark.slow]

HOLDER = """
import fcntl, os, signal, sys
signal.signal(signal.SIGIO, signal.SIG_IGN)  # "somebody wants it": not yet
fd = os.open(sys.argv[1], os.O_RDONLY)
fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("held", flush=True)
sys.stdin.readline()  # a line, not the end: the waiting child has copies of our pipes
"""


class Slow:
    """A copy of /bin/sleep that cannot be opened until `answer()`; within the kernel's 45 s."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "sleep"
        shutil.copy("/bin/sleep", self.path)
        self._holder = subprocess.Popen(
            [sys.executable, "-S", "-c", HOLDER, str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"held\n":
            self.answer()
            pytest.skip("no leases on this file system")

    def answer(self) -> None:
        if self._holder.poll() is None:
            self._holder.communicate(b"\n", timeout=10)


@pytest.fixture
def folder() -> Iterator[Path]:
    with place() as path:
        yield path


@pytest.fixture
def slow(folder) -> Iterator[Slow]:
    found = Slow(folder)
    yield found
    found.answer()


def words(process: psutil.Process) -> list[str]:
    """Its command line; of what has ended or gone meanwhile, nothing."""
    try:
        return list(process.cmdline())
    except (psutil.ZombieProcess, psutil.NoSuchProcess):
        return []


def unborn(pid: int) -> list[psutil.Process]:
    """Children that still have their parent's command line: before their exec is done."""
    parent = psutil.Process(pid)
    return [c for c in parent.children() if words(c) == parent.cmdline()]


def end(child: Child) -> None:
    os.kill(child.pid, signal.SIGKILL)
    os.waitpid(child.pid, 0)
    os.close(child.pidfd)
    os.close(child.output)


@pytest.mark.parametrize("cwd", [None, "/"])
def test_other_threads_run_while_an_exec_waits(slow, cwd):
    """The judging thread must: fifty turns of another thread, a reaper's look among them."""
    reaper, made = Reaper(), []
    spec = SpawnSpec((str(slow.path), "100"), dict(os.environ), cwd=cwd)
    thread = threading.Thread(target=lambda: made.append(spawn(spec, hold=reaper.hold())))
    thread.start()
    try:
        until(lambda: unborn(os.getpid()), what="the child before its exec")
        turned = threading.Event()
        for _ in range(50):
            assert not turned.wait(0.005)  # gives the lock up and asks for it again
            reaper.poll()
        assert thread.is_alive()
        assert made == []
    finally:
        slow.answer()
        thread.join(20)
        end(made[0])


def test_a_child_that_has_not_begun_can_be_ended(slow):
    """What waits in its exec is killed, and the spawn returns a child that died at once."""
    made: list[Child] = []
    spec = SpawnSpec((str(slow.path), "100"), dict(os.environ))
    thread = threading.Thread(target=lambda: made.append(spawn(spec)))
    thread.start()
    until(end_unborn, what="a child that is old enough")
    thread.join(10)
    assert not thread.is_alive()
    assert os.waitpid(made[0].pid, 0)[1] == signal.SIGKILL
    os.close(made[0].pidfd)
    os.close(made[0].output)


def test_one_engine_waits_for_its_file_system_and_the_other_is_judged(folder, slow):
    """The daemon stays live, the other engine's stall is found, the status says what the start waits for;
    the file system answers, and the engine is ready.
    """
    name = f"{tag(folder)}-slow"
    more: dict[str, Any] = {name: {"command": [str(slow.path), "1000"], "plugin": "off"}}
    with daemon(folder, more=more) as run:
        run.wait_ready()
        assert unborn(run.process.pid)
        run.order("worker", "exit1")
        assert run.wait_stall()["kind"] == "CHILD_DIED"
        run.wait_ready(2)
        assert run.get("/livez")[0] == 200
        run.wait(lambda: "has not begun after" in run.engine(name)["reason"], "the reason")
        assert str(slow.path) in run.engine(name)["reason"]
        slow.answer()
        run.wait(lambda: run.engine(name)["state"] == "ready", "the slow engine is ready")
        assert run.engine(name)["incarnation"] == 1


def test_a_daemon_is_stopped_while_an_exec_waits(folder, slow):
    """SIGTERM: exit 0 long before the file system answers, and no engine begins afterwards."""
    settings = {"command": [str(slow.path), "1000"], "port": None, "plugin": "off"}
    with daemon(folder, settings) as run:  # else its first line is read before the exec
        run.wait(lambda: unborn(run.process.pid), "the child before its exec")
        run.process.send_signal(signal.SIGTERM)
        assert run.wait_exit(30) == 0
        slow.answer()
        assert [p.pid for p in psutil.process_iter() if str(slow.path) in words(p)] == []
