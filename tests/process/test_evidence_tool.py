"""A child tool always ends, is always listed while it lives, and never holds us."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time

import pytest

from stallwatch import procfs
from stallwatch.evidence import tool
from stallwatch.evidence.tool import MAX_ABANDONED, ToolRegistry, run

pytestmark = pytest.mark.process


def python(script: str) -> list[str]:
    return [sys.executable, "-S", "-c", script]


def gone(pid: int) -> bool:
    until = time.monotonic() + 5
    while procfs.stat(pid) is not None and time.monotonic() < until:
        select.select([], [], [], 0.005)
    return procfs.stat(pid) is None


def test_output_and_status_come_back():
    """A tool that ends by itself gives both streams and its status, and leaves the registry."""
    registry = ToolRegistry()
    result = run(registry, ["sh", "-c", "printf out; printf err >&2; exit 3"], deadline_s=10)
    assert (result.stdout, result.stderr, result.status) == (b"out", b"err", 3)
    assert result.problem == "sh exited with status 3"
    assert not registry.pids()


def test_everything_written_before_the_end_is_read(monkeypatch):
    """Output left in the pipe when the tool has already exited is not lost."""
    monkeypatch.setattr(tool, "_CHUNK", 1000)  # so that one read cannot empty the pipe
    result = run(ToolRegistry(), ["sh", "-c", "head -c 60000 /dev/zero"], deadline_s=10)
    assert result.ok
    assert len(result.stdout) == 60000


@pytest.mark.slow
def test_a_tool_that_ignores_sigterm_is_killed_at_the_deadline():
    """The deadline is kept against a tool that ignores every signal it can."""
    registry = ToolRegistry()
    script = (
        "import signal,os,time\nfor s in (1,2,3,15): signal.signal(s, signal.SIG_IGN)\n"
        "os.write(1, str(os.getpid()).encode())\ntime.sleep(600)"
    )
    began = time.monotonic()
    result = run(registry, python(script), deadline_s=0.6)
    assert time.monotonic() - began < 2.5
    assert result.timed_out
    assert "did not finish within 0.6 s" in result.problem
    assert gone(int(result.stdout))
    assert not registry.pids()


def test_the_output_cap_ends_an_endless_tool():
    """A tool that never stops writing costs at most the cap, and is killed for it."""
    began = time.monotonic()
    result = run(ToolRegistry(), ["yes"], deadline_s=20, max_bytes=100_000)
    assert result.truncated
    assert len(result.stdout) + len(result.stderr) == 100_000
    assert time.monotonic() - began < 5


def test_a_grandchild_holding_the_pipe_does_not_hold_us():
    """The end of the tool ends the call, though a grandchild keeps the pipe open; it is killed."""
    began = time.monotonic()
    result = run(ToolRegistry(), ["sh", "-c", "sleep 600 & printf $!"], deadline_s=30)
    assert time.monotonic() - began < 5
    assert result.ok
    assert gone(int(result.stdout))


@pytest.mark.parametrize("argv", [["/no/such/tool"], ["/etc/hostname"], ["a\0b"]])
def test_a_tool_that_cannot_start_is_a_sentence(argv):
    """A missing or unusable tool is a problem in words, never an exception."""
    registry = ToolRegistry()
    result = run(registry, argv, deadline_s=1)
    assert result.problem.startswith("cannot start")
    assert result.status is None
    assert not registry.pids()


def test_no_shell_reads_the_arguments():
    """Arguments reach the tool byte for byte."""
    result = run(ToolRegistry(), ["printf", "%s", "$(id); `id` * \n"], deadline_s=10)
    assert result.stdout == b"$(id); `id` * \n"


def test_an_unkillable_tool_is_abandoned_counted_and_later_reaped():
    """A tool that survives SIGKILL costs a bounded wait once; when it does end, it is reaped."""
    killed: list[int] = []
    registry = ToolRegistry(kill=lambda pid, number: killed.append(pid))
    began = time.monotonic()
    result = run(registry, ["sleep", "600"], deadline_s=0.05)
    assert result.abandoned
    assert time.monotonic() - began < 3
    assert registry.abandoned_total == 1
    assert registry.pids() == {killed[0]}  # a stranger's reaper must still leave it to us
    os.kill(killed[0], signal.SIGKILL)
    until = time.monotonic() + 5
    while registry.sweep() and time.monotonic() < until:
        select.select([], [], [], 0.005)
    assert not registry.pids()
    assert procfs.stat(killed[0]) is None


@pytest.mark.slow
def test_after_too_many_unkillable_tools_none_is_started():
    """On a host where tools hang in the kernel, no more tools are added."""
    killed: list[int] = []
    registry = ToolRegistry(kill=lambda pid, number: killed.append(pid))
    threads = [
        threading.Thread(target=run, args=(registry, ["sleep", "600"]), kwargs={"deadline_s": 0.02})
        for _ in range(MAX_ABANDONED)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    refused = run(registry, ["true"], deadline_s=5)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + 5
    while registry.sweep() and time.monotonic() < until:
        select.select([], [], [], 0.005)
    assert "cannot be killed" in refused.problem
    assert run(registry, ["true"], deadline_s=5).ok


@pytest.mark.slow
def test_a_start_that_hangs_does_not_hang_the_reaper(monkeypatch):
    """While a start is stuck in exec, pids() answers all the same, with what is known."""
    registry = ToolRegistry()
    going = registry.start(["sleep", "600"])
    stuck, release = threading.Event(), threading.Event()

    def hang(*args, **kwargs):
        stuck.set()
        release.wait(20)
        raise OSError("no")

    monkeypatch.setattr(tool.subprocess, "Popen", hang)
    starter = threading.Thread(target=run, args=(registry, ["x"]), kwargs={"deadline_s": 1})
    starter.start()
    assert stuck.wait(10)
    began = time.monotonic()
    seen = registry.pids()
    assert time.monotonic() - began < 2
    assert seen == {going.pid}
    release.set()
    starter.join(10)
    assert registry.finish(going)
    for pipe in (going.stdout, going.stderr):
        pipe.close()


@pytest.mark.slow
def test_a_reaper_of_strangers_never_takes_a_tool():
    """A reaper that looks first and asks then leaves 60 short tools to us: each status is right."""
    registry = ToolRegistry()
    stop = threading.Event()

    def reap_strangers() -> None:
        while not stop.is_set():
            with contextlib.suppress(ChildProcessError):  # none now, or reaped meanwhile
                seen = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)
                if seen is not None and seen.si_pid not in registry.pids():
                    os.waitid(os.P_PID, seen.si_pid, os.WEXITED | os.WNOHANG)

    reaper = threading.Thread(target=reap_strangers)
    reaper.start()
    try:
        statuses = [run(registry, ["sh", "-c", "exit 7"], deadline_s=20).status for _ in range(60)]
    finally:
        stop.set()
        reaper.join(10)
    assert statuses == [7] * 60
