"""What a killed daemon leaves, as the next one finds it: ended first, never confused with a stranger."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from daemon_helpers import Daemon, boards, daemon, gone, place, tag, until
from stallwatch import procfs

pytestmark = [pytest.mark.process, pytest.mark.slow]

# The first one becomes another user, so that a daemon without CAP_KILL cannot end it: what survives
# SIGKILL.
OTHER_USER = """
import os, sys, time
from stallwatch import heartbeat
board = heartbeat.attach(role="worker", rank=0)
lane = board.lane("model")
board.ready()
try:
    os.mkdir(sys.argv[1] + "/first")
    os.setresuid(65534, 65534, 65534)
except FileExistsError:
    pass
while True:
    lane.idle()
    time.sleep(0.02)
"""
NO_KILL = ["setpriv", "--bounding-set", "-kill", "--inh-caps", "-kill"]
# A session whose leader has ended: the number of a session that only a child of it still has.
LEADERLESS = """
import os, sys, time
os.setsid()
if os.fork():
    os._exit(0)
print(os.getsid(0), os.getpid(), flush=True)
time.sleep(1000)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with place() as path:
        yield path


def kill_daemon(run: Daemon) -> None:
    """SIGKILL: nothing of its own clean-up runs."""
    run.process.kill()
    run.process.wait(10)


def record_of(run: Daemon) -> Path:
    """The state file of the tree."""
    return run.state / f"{run.name}.tree.json"


def happened(run: Daemon) -> list[str]:
    """The kinds of what this daemon has said, in order."""
    return [event["type"] for event in run.events()]


def test_the_next_daemon_ends_the_old_engine_before_it_starts_its_own(folder):
    """The port is still held by the old engine: it is ended first, so no start is spent on it."""
    with daemon(folder) as run:
        run.wait_ready()
        old = run.members()
        kill_daemon(run)
        assert not gone(old)
        run.start()
        view = run.wait_ready(2)
        assert gone(old)
        assert view["restarts_in_window"] == 0
        said = happened(run)
        assert said.index("leftover") < said.index("serving") < said.index("started")
        assert "backoff" not in said


@contextlib.contextmanager
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own that belongs to nobody's engine."""
    found = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True
    )
    try:
        yield found
    finally:
        found.kill()
        found.wait(10)


def test_a_pid_that_is_a_strangers_by_now_is_left_alone(folder):
    """The file names the stranger's pid as root, member and session, with the old start ticks."""
    with daemon(folder) as run:
        run.wait_ready()
        old = run.members()
        kill_daemon(run)
        for pid in old:
            os.kill(pid, signal.SIGKILL)
        written = json.loads(record_of(run).read_text())
        ticks = dict(written["members"])[written["session"]]
        with stranger() as other:
            assert ticks < (procfs.start_ticks(other.pid) or 0)
            written |= {"session": other.pid, "members": [[other.pid, ticks]]}
            record_of(run).write_text(json.dumps(written))
            run.start()
            run.wait_ready(2)
            assert other.poll() is None
            assert "leftover" not in happened(run)


def test_a_session_number_that_is_a_strangers_by_now_is_left_alone(folder):
    """A service that forked into the background: its session has the old root's number, and no leader."""
    made = subprocess.Popen([sys.executable, "-c", LEADERLESS], stdout=subprocess.PIPE, text=True)
    assert made.stdout is not None
    session, pid = map(int, made.stdout.readline().split())
    made.stdout.close()
    made.wait(10)
    try:
        with daemon(folder) as run:
            run.wait_ready()
            old = run.members()
            kill_daemon(run)
            for each in old:
                os.kill(each, signal.SIGKILL)
            written = json.loads(record_of(run).read_text())
            written |= {"session": session, "members": [[session, 1]]}
            record_of(run).write_text(json.dumps(written))
            run.start()
            run.wait_ready(2)
            assert not gone({pid})
            assert "leftover" not in happened(run)
    finally:
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def unending(folder) -> Iterator[Daemon]:
    """A daemon whose engine the next one, without CAP_KILL, can see and cannot end."""
    (folder / "other.py").write_text(OTHER_USER)
    settings: dict[str, Any] = {
        "command": [sys.executable, str(folder / "other.py"), str(folder)],
        "port": None,
        "restart": {"backoff": ["1s"]},
    }
    with daemon(folder, settings) as run:
        run.wait_ready()
        run.wait(lambda: os.stat(f"/proc/{run.engine()['root_pid']}").st_uid != 0, "another user")
        yield run


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a capability up")
def test_a_leftover_that_cannot_be_ended_keeps_the_engine_from_starting(unending):
    """It is named as the reason, no second engine is started beside it, no budget is spent; it ends,
    and the start follows with nothing of the old one left.
    """
    run = unending
    (old,) = run.members()
    (board,) = boards(run.folder)
    temporary = set(os.listdir(run.folder / "tmp"))
    kill_daemon(run)
    plain = run.argv
    run.argv = [*NO_KILL, *plain]
    run.start()
    try:
        view = run.wait_state("backoff", seconds=40)
        assert f"the earlier incarnation still lives: pid {old}" in view["reason"]
        assert view["restarts_in_window"] == 0
        (left,) = [event for event in run.events() if event["type"] == "leftover"]
        assert f"survived SIGKILL: pid {old}" in left["message"]
        assert not gone({old})
    finally:
        os.kill(old, signal.SIGKILL)
    run.wait_ready(2)
    assert boards(run.folder) != [board]
    assert len(boards(run.folder)) == 1
    assert not temporary & set(os.listdir(run.folder / "tmp"))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a capability up")
def test_a_leftover_is_not_forgotten_by_a_daemon_that_could_not_end_it(unending):
    """The second daemon fails at it and is stopped: the third one, which may, ends it and cleans up."""
    run = unending
    (old,) = run.members()
    (board,) = boards(run.folder)
    kill_daemon(run)
    plain = run.argv
    run.argv = [*NO_KILL, *plain]
    run.start()
    run.wait_state("backoff", seconds=40)
    assert run.stop() == 0
    assert record_of(run).exists()
    assert not gone({old})
    run.argv = plain
    run.start()
    run.wait_ready(2)
    assert gone({old})
    assert board not in boards(run.folder)
    assert f"{tag(run.folder)}-chat (incarnation 1)" in run.log()


def test_a_daemon_killed_in_a_back_off_leaves_nothing_to_end(folder):
    """Between two incarnations there is no tree: the next daemon finds none, and says nothing of any."""
    with daemon(folder, {"restart": {"backoff": ["1h"]}}) as run:
        run.wait_ready()
        run.order("worker", "exit1")
        run.wait_state("backoff")
        until(lambda: not record_of(run).exists(), seconds=5.0, what="the tree is forgotten")
        kill_daemon(run)
        run.start()
        run.wait_state("backoff")
        assert "leftover" not in happened(run)
