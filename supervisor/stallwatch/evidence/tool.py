"""Running a bounded child tool: a deadline, an output cap, and always an end."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

MIB = 1 << 20
MAX_ABANDONED = 8  # so many tools in D state mean that the host is ill: start no more
REAP_S = 0.5
PIDS_S = 0.25
_CHUNK = 65536


@dataclass(frozen=True, slots=True)
class ToolResult:
    """How a tool ended. `problem` is one sentence, empty when it exited with status 0."""

    stdout: bytes = b""
    stderr: bytes = b""
    status: int | None = None  # exit status; negative: the signal that ended it; None: not known
    timed_out: bool = False
    truncated: bool = False  # it wrote more than the cap and was killed for it
    abandoned: bool = False  # it survived SIGKILL for REAP_S
    took_s: float = 0.0
    problem: str = ""

    @property
    def ok(self) -> bool:
        return self.status == 0 and not (self.timed_out or self.truncated)


class ToolRegistry:
    """The pids of our own tools, so that a reaper of strangers leaves them to us.

    A reaper first sees a dead child (waitid, WNOWAIT) and then asks `pids()`. That call waits
    for a start under way: a tool that dies at once is therefore listed before anyone can ask.
    """

    def __init__(self, *, kill: Callable[[int, int], None] = os.killpg) -> None:
        self._lock = threading.Lock()
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._abandoned: dict[int, subprocess.Popen[bytes]] = {}
        self._kill = kill
        self.abandoned_total = 0

    def pids(self) -> frozenset[int]:
        """Every tool that we have not reaped yet, abandoned ones included.

        Waits at most PIDS_S: a start may hang in exec (a dead network file system), and that
        must not stop the reaper. A child that is still in exec cannot be a zombie, so the list
        without it is right.
        """
        held = self._lock.acquire(timeout=PIDS_S)
        try:
            return frozenset(list(self._running)) | frozenset(list(self._abandoned))
        finally:
            if held:
                self._lock.release()

    def start(
        self, argv: Sequence[str], *, stdin: int = subprocess.DEVNULL
    ) -> subprocess.Popen[bytes]:
        """Start a tool in its own session and list it in one step. Raises OSError."""
        with self._lock:
            self._sweep()
            if len(self._abandoned) >= MAX_ABANDONED:
                raise OSError(f"{len(self._abandoned)} earlier tools cannot be killed")
            tool = subprocess.Popen(
                list(argv),
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C at the terminal is not for it; killpg is exact
                env={**os.environ, "LC_ALL": "C"},  # messages are matched in English
                bufsize=0,
            )
            self._running[tool.pid] = tool
            return tool

    def finish(self, tool: subprocess.Popen[bytes], wait_s: float = REAP_S) -> bool:
        """Kill what is left of the tool's group and reap it; False: abandoned."""
        # Before the reaping, while the zombie still keeps the group id ours.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            self._kill(tool.pid, signal.SIGKILL)
        try:
            tool.wait(wait_s)
        except subprocess.TimeoutExpired:
            with self._lock:
                self._running.pop(tool.pid, None)
                self._abandoned[tool.pid] = tool
                self.abandoned_total += 1
            return False
        with self._lock:
            self._running.pop(tool.pid, None)
        return True

    def _sweep(self) -> None:
        """Reap abandoned tools that ended after all; never waits."""
        for pid, tool in list(self._abandoned.items()):
            if tool.poll() is not None:
                del self._abandoned[pid]

    def sweep(self) -> int:
        """Reap abandoned tools that have ended; returns how many are left."""
        with self._lock:
            self._sweep()
            return len(self._abandoned)


def run(
    registry: ToolRegistry, argv: Sequence[str], *, deadline_s: float, max_bytes: int = 8 * MIB
) -> ToolResult:
    """Run `argv` (never through a shell) for at most `deadline_s` seconds, plus REAP_S to reap it.

    Never raises for what the tool does: see ToolResult.problem. SIGTERM is not tried: a tool
    that holds its target stopped must not get to decide (marin 6019).
    """
    began = time.monotonic()
    try:
        tool = registry.start(argv)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return ToolResult(problem=f"cannot start {os.path.basename(argv[0])}: {why}")
    drained = _Drain(max_bytes)
    try:
        drained.pump(tool, began + deadline_s)
    except OSError:
        drained.timed_out = True  # no descriptors left, or a stranger reaped it: end it, say less
    finally:
        # Closed before the reaping, so that a tool which cannot die keeps no buffer of ours.
        for pipe in (tool.stdout, tool.stderr):
            if pipe is not None:
                pipe.close()
        reaped = registry.finish(tool)
    late = drained.timed_out
    return ToolResult(
        stdout=bytes(drained.out),
        stderr=bytes(drained.err),
        status=tool.returncode if reaped and not (late or drained.full) else None,
        timed_out=late,
        truncated=drained.full,
        abandoned=not reaped,
        took_s=time.monotonic() - began,
        problem=_problem(argv, tool.returncode, drained, deadline_s),
    )


def _problem(argv: Sequence[str], status: int | None, drained: _Drain, deadline_s: float) -> str:
    name = os.path.basename(argv[0])
    if drained.timed_out:
        return f"{name} did not finish within {deadline_s:.2g} s and was killed"
    if drained.full:
        return f"{name} wrote more than {drained.cap} bytes and was killed"
    if status is not None and status < 0:
        return f"{name} was ended by signal {-status}"
    return f"{name} exited with status {status}" if status else ""


class _Drain:
    """Reads both pipes until the tool ends, the cap is reached or the time is over."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.out = bytearray()
        self.err = bytearray()
        self.timed_out = False
        self.full = False

    def pump(self, tool: subprocess.Popen[bytes], until: float) -> None:
        # The end of the process decides, not the end of the pipe: a grandchild that inherited
        # the pipe would keep it open for ever.
        with _pidfd(tool.pid) as ended, selectors.DefaultSelector() as selector:
            selector.register(ended, selectors.EVENT_READ, None)
            for pipe, into in ((tool.stdout, self.out), (tool.stderr, self.err)):
                assert pipe is not None  # asked for in start()
                os.set_blocking(pipe.fileno(), False)
                selector.register(pipe.fileno(), selectors.EVENT_READ, into)
            while not self.full:
                left = until - time.monotonic()
                if left <= 0:
                    self.timed_out = True
                    return
                ready = selector.select(left)
                over = False
                for key, _ in ready:
                    if key.data is None:
                        over = True
                    elif not self._read(key.fd, key.data):
                        selector.unregister(key.fd)
                if over:
                    self._rest(tool)
                    return

    def _read(self, fd: int, into: bytearray) -> bool:
        """One read; False at the end of the pipe."""
        try:
            got = os.read(fd, _CHUNK)
        except BlockingIOError:
            return True
        room = self.cap - len(self.out) - len(self.err)
        into += got[:room]
        self.full = self.full or len(got) > room
        return bool(got)

    def _rest(self, tool: subprocess.Popen[bytes]) -> None:
        """What the dead tool left in its pipes."""
        for pipe, into in ((tool.stdout, self.out), (tool.stderr, self.err)):
            assert pipe is not None
            before = -1
            while len(into) != before and not self.full:
                before = len(into)
                self._read(pipe.fileno(), into)


@contextlib.contextmanager
def _pidfd(pid: int) -> Iterator[int]:
    fd = os.pidfd_open(pid)
    try:
        yield fd
    finally:
        os.close(fd)
