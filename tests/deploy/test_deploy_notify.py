"""The daemon under a service manager that listens: a real notify socket, the watchdog, a reload."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon_helpers import ENGINES, STALLWATCH, Daemon, daemon, free_port, place, request, until
from deploy_helpers import BIN, DEPLOY, Manager, manager, unit

pytestmark = [pytest.mark.process, pytest.mark.slow]

WATCHDOG_US = 400_000
PTRACE_CONT, PTRACE_DETACH, PTRACE_SEIZE, PTRACE_INTERRUPT = 7, 17, 0x4206, 0x4207
WALL = 0x40000000  # wait for a thread, too


@pytest.fixture
def folder() -> Iterator[Path]:
    with place() as path:
        yield path


@pytest.fixture
def systemd(folder: Path) -> Iterator[Manager]:
    with manager(folder / "notify") as found:
        yield found


def env(systemd: Manager) -> dict[str, str]:
    return {"NOTIFY_SOCKET": str(systemd.path), "WATCHDOG_USEC": str(WATCHDOG_US)}


def loader(folder: Path) -> dict:
    """An engine that loads until it is released, for longer than any limit of the manager."""
    return {
        "command": [sys.executable, ENGINES, "loader", str(folder)],
        "port": None,
        "limits": {"default": "30s"},
    }


def judge_of(pid: int) -> int:
    """The thread id of the judging loop."""
    argv = [str(BIN / "py-spy"), "dump", "--json", "--nonblocking", "--pid", str(pid)]
    found = subprocess.run(argv, capture_output=True, check=True, timeout=20)
    threads = json.loads(found.stdout)
    return next(t["os_thread_id"] for t in threads if t["thread_name"] == "stallwatch-judge")


def ptrace(request_: int, tid: int) -> bool:
    call = ctypes.CDLL(None, use_errno=True).ptrace
    call.argtypes = [ctypes.c_long] * 4
    call.restype = ctypes.c_long
    return bool(call(request_, tid, 0, 0) == 0)


@contextlib.contextmanager
def frozen(run: Daemon) -> Iterator[None]:
    """The judging thread alone is stopped, by ptrace, at a moment when it holds no lock of Python.

    Every other thread goes on: if the thread was caught with the GIL, /livez does not answer, and it
    is let go and caught again.
    """
    tid = judge_of(run.process.pid)
    if not ptrace(PTRACE_SEIZE, tid):
        pytest.skip(f"ptrace is refused here (errno {ctypes.get_errno()})")
    try:
        for _ in range(20):
            ptrace(PTRACE_INTERRUPT, tid)
            os.waitpid(tid, WALL)
            if request("GET", run.control, "/livez", 1.0)[0]:
                break
            ptrace(PTRACE_CONT, tid)
        else:
            raise AssertionError("the judge was never caught without the GIL")
        yield
    finally:
        ptrace(PTRACE_DETACH, tid)


def test_ready_only_once_an_engine_serves_and_more_time_asked_for_until_then(folder, systemd):
    """EXTEND_TIMEOUT each second while loading, longer than the gap between two; READY once, at READY."""
    with daemon(folder, loader(folder), env=env(systemd)) as run:
        run.wait_state("starting")
        heard = systemd.wait("EXTEND_TIMEOUT_USEC=", count=3)
        assert not any(line.startswith("READY") for line in heard)
        grants = [int(x.partition("=")[2]) for x in heard if x.startswith("EXTEND")]
        assert min(grants) >= 10_000_000
        run.release()
        heard = systemd.wait("READY=1")
        assert systemd.wait("MAINPID=")[-1] == f"MAINPID={run.process.pid}"
        assert run.engine()["state"] == "ready"
        after = systemd.mark()
        heard = systemd.wait("STATUS=", since=after, count=2)
        assert not any(line.startswith(("READY", "EXTEND")) for line in heard)
        assert f"{run.name} ready" in heard[-1]


def test_the_watchdog_is_fed_by_the_judging_loop_and_by_nobody_else(folder, systemd):
    """With the judge alone stopped STATUS and HTTP go on and WATCHDOG ends; let go, it comes back."""
    with daemon(folder, env=env(systemd)) as run:
        run.wait_ready()
        systemd.wait("WATCHDOG=1", count=2)
        with frozen(run):
            since = systemd.mark()
            heard = systemd.wait("STATUS=", since=since, count=3)
            assert "WATCHDOG=1" not in heard
            run.wait(lambda: run.get("/livez")[0] == 503, "/livez says no")
            assert b"judge has not turned" in run.get("/livez?verbose")[1]
            assert "WATCHDOG=1" not in systemd.heard[since:]
        systemd.wait("WATCHDOG=1", since=systemd.mark())
        run.wait(lambda: run.get("/livez")[0] == 200, "/livez says yes again")
        run.wait_ready()
        assert run.stalls() == []  # the gap was ours: no engine is accused of it


def test_a_stopped_daemon_feeds_no_watchdog(folder, systemd):
    """SIGSTOP to the daemon: silence on the socket for several intervals, then as before."""
    with daemon(folder, env=env(systemd)) as run:
        run.wait_ready()
        run.process.send_signal(signal.SIGSTOP)
        try:
            run.wait(lambda: stopped(run.process.pid), "state T")
            since = systemd.mark()
            for _ in range(8):  # a read waits for 0.2 s at most
                systemd.read()
            assert systemd.heard[since:] == []
        finally:
            run.process.send_signal(signal.SIGCONT)
        systemd.wait("WATCHDOG=1", since=since)


def stopped(pid: int) -> bool:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return all((t / "stat").read_text().rpartition(")")[2].split()[0] == "T" for t in threads)


def test_sighup_is_a_reload_with_a_beginning_and_an_end(folder, systemd):
    """ExecReload sends SIGHUP: RELOADING with its moment, then READY, for a good file and a bad one."""
    service = unit(DEPLOY / "systemd/stallwatch.service")
    assert service["Service.ExecReload"] == ["/bin/kill -HUP $MAINPID"]
    with daemon(folder, env=env(systemd)) as run:
        run.wait_ready()
        systemd.wait("READY=1")
        for text in (None, "nonsense"):
            run.write(text)
            since = systemd.mark()
            run.process.send_signal(signal.SIGHUP)
            heard = systemd.wait("READY=1", since=since)
            told = [line for line in heard if not line.startswith(("STATUS", "WATCHDOG"))]
            assert told[0] == "RELOADING=1"
            assert told[1].startswith("MONOTONIC_USEC=")
            assert told[-1] == "READY=1"


def test_stopping_is_said_before_the_engines_are_stopped(folder, systemd):
    """SIGTERM: STOPPING at once, exit status 0, and the engine got its own SIGTERM."""
    with daemon(folder, env=env(systemd)) as run:
        run.wait_ready()
        run.process.send_signal(signal.SIGTERM)
        systemd.wait("STOPPING=1")
        assert run.wait_exit() == 0
        assert "SIGTERM" in run.log()


def test_the_gateways_unit_starts_without_a_daemon_and_is_watched(folder, systemd):
    """ExecStart of its unit: READY once it listens, WATCHDOG from its loop, 503 with a reason, 0 at SIGTERM."""
    (line,) = unit(DEPLOY / "systemd/stallwatch-gateway.service")["Service.ExecStart"]
    port = free_port()
    words = [w.replace(":8000", f":{port}") for w in line.split()[1:]]
    gateway = subprocess.Popen(
        [STALLWATCH, *words],
        env={**os.environ, **env(systemd), "STALLWATCH_SOCKET": str(folder / "none.sock")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        systemd.wait("READY=1")
        systemd.wait("WATCHDOG=1", count=2)
        assert request("POST", port, "/v1/completions")[0] == 503
        gateway.send_signal(signal.SIGSTOP)
        until(lambda: stopped(gateway.pid), what="state T")
        since = systemd.mark()
        for _ in range(6):  # a read waits for 0.2 s at most
            systemd.read()
        assert systemd.heard[since:] == []
        gateway.send_signal(signal.SIGCONT)
        systemd.wait("WATCHDOG=1", since=since)
        gateway.terminate()
        assert gateway.wait(20) == 0
    finally:
        gateway.kill()
        gateway.wait(10)
