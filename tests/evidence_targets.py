"""Real processes in the states that evidence must cope with. Each says when it is there."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from stallwatch import procfs
from stallwatch.evidence.model import Target

HELPER = """
import threading
threading.Thread(target=threading.Event().wait, name="helper", daemon=True).start()
"""
SCRIPTS = {
    "idle": HELPER + "import sys\ndef wait_for_work(): sys.stdin.read()\nsay(); wait_for_work()",
    "gil": HELPER + "import ctypes\ndef hold(): ctypes.PyDLL(None).sleep(600)\nsay(); hold()",
    "spin": "def spin():\n    while True: pass\nsay(); spin()",
    # The parent of vfork is in D until its child execs; killable, so it can be cleaned up.
    "dstate": "import ctypes, time\nlibc = ctypes.PyDLL(None)\ndef stuck():\n"
    "    if libc.vfork() == 0: time.sleep(600)\nsay(); stuck()",
    "undumpable": "import ctypes, sys\nctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\n"
    "say(); sys.stdin.read()",
    # argv: the folder. Registers the dump signal as stallwatch.heartbeat does.
    "dumpable": HELPER + "import faulthandler, signal, sys\n"
    "file = open(sys.argv[1] + '/dump', 'ab')\n"
    "faulthandler.register(signal.SIGURG, file=file, all_threads=True)\n"
    "def wait_for_work(): sys.stdin.read()\nsay(); wait_for_work()",
}
_SAY = "def say():\n    import os; os.write(1, b'.')\n"


@contextlib.contextmanager
def process(kind: str, *args: str, state: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """One target; killed with its children and reaped at the end."""
    target = subprocess.Popen(
        [sys.executable, "-c", _SAY + SCRIPTS[kind], *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        read(target, 1)
        wanted = {"dstate": "D", "gil": "S", "idle": "S", "dumpable": "S", "undumpable": "S"}.get(
            kind, ""
        )
        if wanted:
            wait_state(target.pid, wanted)
        if state == "T":
            target.send_signal(signal.SIGSTOP)
            wait_state(target.pid, "T")
        yield target
    finally:
        os.killpg(target.pid, signal.SIGKILL)
        target.wait(10)
        for pipe in (target.stdin, target.stdout):
            assert pipe is not None
            pipe.close()


def read(target: subprocess.Popen[bytes], count: int, within_s: float = 20.0) -> bytes:
    assert target.stdout is not None
    fd, got = target.stdout.fileno(), b""
    until = time.monotonic() + within_s
    while len(got) < count:
        ready, _, _ = select.select([fd], [], [], max(0.0, until - time.monotonic()))
        assert ready, "the target did not start in time"
        more = os.read(fd, count - len(got))
        assert more, "the target ended"
        got += more
    return got


def wait_state(pid: int, states: str, within_s: float = 20.0) -> None:
    """Until the main thread is in one of the states."""
    until = time.monotonic() + within_s
    while (found := procfs.stat(pid)) is None or found.state not in states:
        assert time.monotonic() < until, f"pid {pid} is in {found and found.state}, not {states}"
        select.select([], [], [], 0.002)


def target_of(
    child: subprocess.Popen[bytes], *, role: str = "worker", rank: int = 0, run: Path | None = None
) -> Target:
    ticks = procfs.start_ticks(child.pid)
    assert ticks is not None
    if run is None:
        return Target(child.pid, ticks, role, rank)
    return Target(child.pid, ticks, role, rank, int(signal.SIGURG), str(run / "dump"))


def without_ptrace(script: str, *args: str) -> str:
    """Run Python as root without CAP_SYS_PTRACE, as in a usual container; its standard output."""
    argv = ["setpriv", "--bounding-set", "-sys_ptrace", sys.executable, "-c", script, *args]
    done = subprocess.run(argv, capture_output=True, timeout=30, check=False, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
