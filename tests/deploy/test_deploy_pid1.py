"""The first process of a container: no tini, in namespaces of its own with its own /dev/shm."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from daemon_helpers import ENGINES, Daemon, daemon, gone, place, until

CONTAINER = [
    *("unshare", "--pid", "--fork", "--mount", "--mount-proc", "--kill-child"),
    *("sh", "-c", 'mount -t tmpfs -o mode=1777 none /dev/shm && exec "$@"', "sh"),
]


def can_unshare() -> bool:
    argv = [*CONTAINER, "true"]
    with contextlib.suppress(OSError):
        return subprocess.run(argv, capture_output=True, timeout=20, check=False).returncode == 0
    return False


pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(not can_unshare(), reason="namespaces need root and unshare(1)"),
]


@pytest.fixture
def folder() -> Iterator[Path]:
    with place() as path:
        yield path


def first(run: Daemon) -> psutil.Process:
    """The daemon as this machine sees it: unshare's only child."""
    return until(
        lambda: next(iter(psutil.Process(run.process.pid).children()), None), what="a child"
    )


def inside(pid: int) -> int:
    """The pid that a process has in its own namespace."""
    rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(r for r in rows if r.startswith("NSpid:")).split()[-1])


def test_a_stall_is_handled_by_process_1(folder):
    """pid 1 of its namespace: verdict with stacks, FAILURE, restart, exit 0, nothing left."""
    with daemon(folder, before=CONTAINER) as run:
        run.wait_ready()
        one = first(run)
        assert inside(one.pid) == 1
        run.order("worker", "stall")
        report = run.wait_stall()
        run.wait_ready(2)
        report = run.report(report["id"])
        assert report["culprit"]["lane"] == "worker:0/model"
        assert report["rung"].startswith("py-spy")
        tree = {p.pid for p in one.children(recursive=True)}
        one.send_signal(signal.SIGTERM)
        assert run.wait_exit() == 0
        assert gone(tree)


def test_orphans_of_anybody_are_reaped(folder):
    """A stranger's orphan (`docker exec`) and one of the engine end: neither stays as a zombie."""
    command = [sys.executable, ENGINES, "api", str(folder), "{port}", "orphan"]
    with daemon(folder, {"command": command}, before=CONTAINER) as run:
        run.wait_ready()
        one = first(run)
        script = "import os; os.fork() or os.setsid() or os.execvp('sleep', ['sleep', '987'])"
        enter = ["nsenter", "-t", str(one.pid), "-p", "-m", sys.executable, "-c", script]
        subprocess.run(enter, check=True, timeout=20)

        def sleeping() -> psutil.Process | None:
            kids = one.children()
            return next((p for p in kids if p.name() == "sleep"), None)

        stranger = until(sleeping, what="the stranger became a child of process 1")
        stranger.kill()
        until(lambda: not psutil.pid_exists(stranger.pid), what="the stranger was reaped")
        orphan = until(lambda: next(iter(folder.glob("sleeper.*")), None), what="the orphan")
        number = int(orphan.name.partition(".")[2])
        kids = {inside(p.pid): p for p in one.children()}
        kids[number].kill()
        until(lambda: not psutil.pid_exists(kids[number].pid), what="the orphan was reaped")
        assert not [p for p in one.children(recursive=True) if p.status() == "zombie"]
        one.send_signal(signal.SIGTERM)
        assert run.wait_exit() == 0


def test_signals_reach_the_engine_in_order(folder):
    """SIGTERM: the engine gets its SIGTERM and its grace; a second one ends it at once."""
    with daemon(folder, {"stop_grace": "60s"}, before=CONTAINER) as run:
        run.wait_ready()
        first(run).send_signal(signal.SIGTERM)
        assert run.wait_exit() == 0
        assert "SIGTERM" in run.log()
    with daemon(folder, {"stop_grace": "60s"}, "deaf", before=CONTAINER) as run:
        run.wait_ready()
        one = first(run)
        one.send_signal(signal.SIGTERM)
        run.wait(lambda: run.engine().get("state") == "stopping", "stopping")
        one.send_signal(signal.SIGTERM)
        assert run.wait_exit(10) == 0


@pytest.mark.parametrize(
    ("engine", "supervisor", "code"),
    [
        ({"command": ["/nonexistent/engine"]}, {"exit_when": "all"}, 3),
        ({"command": []}, {}, 78),
    ],
)
def test_the_exit_code_is_the_containers(folder, engine, supervisor, code):
    """What orchestrators map by: 3 (never ready) and 78 (bad configuration) come out unchanged."""
    with daemon(folder, engine, supervisor=supervisor, before=CONTAINER) as run:
        assert run.wait_exit() == code


def test_a_spent_budget_ends_the_container_with_1(folder):
    """Ready once, then given up: 1."""
    settings = {"restart": {"policy": "never", "backoff": ["10ms"]}}
    with daemon(folder, settings, supervisor={"exit_when": "all"}, before=CONTAINER) as run:
        run.wait_ready()
        run.order("worker", "stall")
        assert run.wait_exit() == 1
