"""Real process trees in one line each, for tests of whoever follows and ends them.

Every program prints one line when it is set up: its own pid, then the pids it started.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from stallwatch.process.maps import FileId
from stallwatch.process.members import Membership
from stallwatch.process.reaper import Owned, Reaper
from stallwatch.process.spawn import Child, SpawnSpec, spawn

_HEAD = """
import os, signal, sys, time
def say(*pids): os.write(1, (" ".join(map(str, (os.getpid(), *pids))) + chr(10)).encode())
def rest():
    while True: signal.pause()
def child(run):
    pid = os.fork()
    if pid == 0:
        try: run()
        finally: os._exit(0)
    return pid
"""
SLEEPER = _HEAD + "say(); rest()"
PARENT = _HEAD + "say(child(rest)); rest()"
STUBBORN = _HEAD + "signal.signal(signal.SIGTERM, signal.SIG_IGN); say(child(rest)); rest()"
# A child with a session of its own, as a worker that calls setsid.
SETSID = _HEAD + "say(child(lambda: (os.setsid(), rest()))); rest()"
# A daemon: setsid, fork, and the middle ends. Its parent is init, or the subreaper.
DAEMON = (
    _HEAD
    + """
r, w = os.pipe()
def middle():
    os.setsid()
    os.write(w, str(child(rest)).encode())
os.waitpid(child(middle), 0)
say(int(os.read(r, 32))); rest()
"""
)
# The root ends at once; a grandchild in its session lives on.
ROOT_DIES = _HEAD + "say(child(rest)); os._exit(0)"
# Forks for as long as it lives: each child forks again and ends.
HOPPER = (
    _HEAD
    + """
def hop():
    while True:
        if os.fork(): os._exit(0)
say(child(hop)); rest()
"""
)
SPREADER = (
    _HEAD
    + """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
def spread():
    while True:
        child(rest); time.sleep(0.002)
say(child(spread)); rest()
"""
)
# Orphans that live for 30 ms each: every one leaves its session, forks and ends, six at a time.
HYDRA = (
    _HEAD
    + """
def head():
    os.setsid()
    if os.fork(): os._exit(0)
    while True:
        time.sleep(0.03)
        if os.fork(): os._exit(0)
        os.setsid()
        if os.fork(): os._exit(0)
for _ in range(6): os.waitpid(child(head), 0)
say(); rest()
"""
)
# The middle reaps its child's status 7 at once: nobody else can wait for it.
REAPS_ITS_OWN = (
    _HEAD
    + """
def middle():
    r, w = os.pipe()
    pid = child(lambda: (os.read(r, 1), os._exit(7)))
    signal.signal(signal.SIGUSR1, lambda *_: os.write(w, b"x"))
    say(pid); sys.stdin = None
    os.waitpid(pid, 0); say(pid); rest()
child(middle); rest()
"""
)
# Named as Python's own: it ends by itself when the pipe from its parent closes.
TRACKER = (
    _HEAD
    + """
r, w = os.pipe(); os.set_inheritable(r, True)
code = "from multiprocessing.resource_tracker import main; import os; os.read(%d, 1)" % r
pid = os.posix_spawn(sys.executable, [sys.executable, "-S", "-E", "-c", code], os.environ)
os.close(r); say(pid); rest()
"""
)


def argv(program: str) -> tuple[str, ...]:
    """The command that runs a program: no site, no user environment, 15 ms."""
    return (sys.executable, "-S", "-E", "-u", "-c", program)


def read_line(fd: int, timeout_s: float = 10.0) -> str:
    """One line from a pipe; raises TimeoutError or EOFError."""
    line, until = b"", time.monotonic() + timeout_s
    while not line.endswith(b"\n"):
        if not select.select([fd], [], [], max(0.0, until - time.monotonic()))[0]:
            raise TimeoutError(f"no line within {timeout_s} s, only {line!r}")
        got = os.read(fd, 1)
        if not got:
            raise EOFError(f"the pipe ended after {line!r}")
        line += got
    return line.decode().rstrip("\n")


def wait_until(what: object, timeout_s: float = 10.0) -> None:
    """Poll a callable until it is true; raises TimeoutError. For states that send no event."""
    assert callable(what)
    until = time.monotonic() + timeout_s
    while not what():
        if time.monotonic() > until:
            raise TimeoutError(f"{what} was still false after {timeout_s} s")
        select.select([], [], [], 0.005)


class Tree:
    """A spawned program and its membership."""

    def __init__(self, child: Child, members: Membership) -> None:
        self.child = child
        self.members = members

    def pids(self) -> list[int]:
        """The pids of the next line that the program prints."""
        return [int(word) for word in read_line(self.child.output).split()]

    def settle(self, pids: set[int]) -> None:
        """Tick until exactly these live."""

        def done() -> bool:
            self.members.poll()
            return self.members.members().keys() == pids

        wait_until(done)


@contextmanager
def tree(
    program: str,
    *,
    reaper: Reaper,
    owned: Owned | None = None,
    board: FileId | None = None,
    adopt_orphans: bool = True,
) -> Iterator[Tree]:
    """Start a program and follow it; at the end nothing of it is left, however the test went."""
    spec = SpawnSpec(argv(program), dict(os.environ))
    child = spawn(spec, hold=reaper.hold())
    members = Membership(reaper=reaper, owned=owned, board=board, adopt_orphans=adopt_orphans)
    members.add_root(child.pid, child.start_ticks, child.pidfd)
    try:
        yield Tree(child, members)
    finally:
        _sweep(members)
        members.close()
        os.close(child.output)


def _sweep(members: Membership) -> None:
    until = time.monotonic() + 10
    while (members.scan() or members.members()) and time.monotonic() < until:
        for pid in members.members():
            members.signal(pid, signal.SIGKILL)
        members.wait_any(0.05)
        members.poll()
