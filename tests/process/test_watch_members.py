"""Facts of real processes: stops, tracers, threads, ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stallwatch import procfs
from stallwatch.watch.members import Members, Wants

pytestmark = pytest.mark.process

SLEEPER = "import sys, threading\nprint('up', flush=True)\nsys.stdin.read()"
THREADED = """
import sys, threading
end = threading.Event()
thread = threading.Thread(target=end.wait)
thread.start()
print(thread.native_id, flush=True)
sys.stdin.readline()
end.set(); thread.join()
print('joined', flush=True)
sys.stdin.read()
"""
TRACER = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long] * 2 + [ctypes.c_void_p] * 2
pid = int(sys.argv[1])
assert libc.ptrace(16, pid, None, None) == 0, ctypes.get_errno()  # PTRACE_ATTACH
os.waitpid(pid, 0x40000000)  # __WALL
print('attached', flush=True)
sys.stdin.read()
libc.ptrace(17, pid, None, None)  # PTRACE_DETACH
"""


@pytest.fixture
def spawn():
    """spawn(source, *args) -> (Popen, first line of its output); all are ended afterwards."""
    children: list[subprocess.Popen[str]] = []

    def start(source: str, *args: str) -> tuple[subprocess.Popen[str], str]:
        child = subprocess.Popen(
            [sys.executable, "-S", "-c", source, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        assert select.select([child.stdout], [], [], 20)[0], "no sign of life"
        return child, child.stdout.readline().strip()

    yield start
    for child in reversed(children):
        child.kill()
        with child:  # closes the pipes and reaps
            pass


@pytest.fixture
def members():
    members = Members()
    yield members
    members.close()


def look(members: Members, pid: int, at_s: float = 0.0, **wants):
    ticks = wants.pop("ticks", None) or procfs.start_ticks(pid) or 0
    return members.look({pid: ticks}, Wants(now_ns=int(at_s * 1e9), **wants)).get(pid)


def eventually(true, deadline_s: float = 10.0):
    end = time.monotonic() + deadline_s
    while not (found := true()) and time.monotonic() < end:
        time.sleep(0.005)
    return found


def test_a_member_is_that_very_process(spawn, members):
    """Pid and start ticks identify; another start time is another process."""
    child, _ = spawn(SLEEPER)
    facts = look(members, child.pid)
    assert (facts.pid, facts.ppid, facts.tracer_pid) == (child.pid, os.getpid(), 0)
    assert look(members, child.pid, ticks=facts.start_ticks + 1) is None


def test_a_zombie_is_no_living_member_and_its_file_is_closed(spawn, members):
    """Trap: kill(pid, 0) still succeeds for a zombie; here it is gone."""
    child, _ = spawn(SLEEPER)
    ticks = procfs.start_ticks(child.pid)
    assert look(members, child.pid, ticks=ticks) is not None
    open_before = len(os.listdir("/proc/self/fd"))
    os.kill(child.pid, signal.SIGKILL)
    assert eventually(lambda: look(members, child.pid, ticks=ticks) is None)
    child.wait(10)
    assert look(members, child.pid, ticks=ticks) is None
    members.look({}, Wants(now_ns=0))
    assert len(os.listdir("/proc/self/fd")) == open_before - 1


def test_a_sigstop_shows_at_the_next_look(spawn, members):
    """State T without a tracer, although the stat file was kept open."""
    child, _ = spawn(SLEEPER)
    look(members, child.pid)
    os.kill(child.pid, signal.SIGSTOP)
    facts = eventually(lambda: (f := look(members, child.pid)) and f.state == "T" and f)
    assert facts.tracer_pid == 0
    assert facts.thread_facts
    os.kill(child.pid, signal.SIGCONT)
    assert eventually(lambda: look(members, child.pid).state == "S")
    assert not look(members, child.pid).thread_facts


def test_a_tracer_is_named(spawn, members):
    """F12: a debugger shows as state t and TracerPid, and is gone after it detached."""
    child, _ = spawn(SLEEPER)
    tracer, _ = spawn(TRACER, str(child.pid))
    facts = look(members, child.pid)
    assert (facts.state, facts.tracer_pid) == ("t", tracer.pid)
    tracer.stdin.close()
    tracer.wait(10)
    assert eventually(lambda: look(members, child.pid).tracer_pid == 0)


def test_a_thread_that_ends_leaves_the_list_at_the_next_look(spawn, members):
    """K09: the list is read again when the thread count changes, not only once a second."""
    child, tid = spawn(THREADED)
    lanes = {child.pid: {child.pid, int(tid)}}
    assert int(tid) in look(members, child.pid, lanes=lanes).tids
    child.stdin.write("\n")
    child.stdin.flush()
    assert child.stdout.readline() == "joined\n"
    # The thread is joined in Python slightly before the kernel lets its id go.
    assert eventually(lambda: int(tid) not in look(members, child.pid, lanes=lanes).tids)
    assert child.pid in look(members, child.pid, lanes=lanes).tids


def test_the_list_is_not_read_without_need(spawn, members, monkeypatch):
    """64 processes at ten looks a second: one listing a second each, and none without lanes."""
    child, _ = spawn(SLEEPER)
    calls: list[int] = []
    listed = procfs.tids
    monkeypatch.setattr(procfs, "tids", lambda pid, proc: calls.append(pid) or listed(pid, proc))
    lanes = {child.pid: {child.pid}}
    assert look(members, child.pid).tids is None
    for tenth in range(21):
        look(members, child.pid, tenth / 10, lanes=lanes)
    assert len(calls) == 3


def test_suspects_show_their_threads_and_bytes_are_read_while_starting(spawn, members):
    """Thread facts cost, so only suspects pay; I/O counters only where a start is judged."""
    child, tid = spawn(THREADED)
    plain = look(members, child.pid)
    assert (plain.thread_facts, plain.read_bytes) == ({}, None)
    facts = look(members, child.pid, suspects={child.pid}, fresh=True, io=True)
    assert set(facts.thread_facts) == {child.pid, int(tid)}
    assert facts.thread_facts[int(tid)].state in "RS"
    assert facts.read_bytes > 0
    assert facts.written_bytes > 0


def test_garbage_in_proc_is_nobody(tmp_path, members):
    """A stat line that cannot be parsed is a process that is gone, never an exception."""
    odd = Members(Path(tmp_path))
    for raw in (b"", b"7 (x", b"7 (x) S 1", b"\x00" * 64, b"x (y) " + b"z " * 40):
        (tmp_path / "7").mkdir(exist_ok=True)
        (tmp_path / "7" / "stat").write_bytes(raw)
        assert odd.look({7: 1}, Wants(now_ns=0, suspects={7}, io=True)) == {}
    odd.close()
