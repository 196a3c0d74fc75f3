"""The operator's command: the notice on stdin, a deadline, an end in any case."""

from __future__ import annotations

import os
import selectors
import subprocess
import threading
import time
from collections.abc import Sequence

from stallwatch.evidence.tool import ToolRegistry
from stallwatch.hooks.notice import Notice
from stallwatch.hooks.worker import Outcome

_TAIL = 2048  # bytes of output kept to say why it failed; the rest is read and forgotten
_LOOK_S = 0.1
_CHUNK = 65536


class CommandHook:
    """Runs `argv` once for each notice, never through a shell, in a session of its own."""

    def __init__(self, argv: Sequence[str], tools: ToolRegistry, *, deadline_s: float) -> None:
        self._argv = tuple(argv)
        self._tools = tools
        self._deadline_s = deadline_s

    def deliver(self, notice: Notice, abort: threading.Event) -> Outcome:
        """Until it ends, the deadline or the abort. What it left in its group is killed."""
        name = os.path.basename(self._argv[0])
        until = time.monotonic() + self._deadline_s
        try:
            tool = self._start(notice.body())
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            return Outcome(f"cannot start {name}: {why}")
        try:
            ended, tail = _watch(tool, until, abort)
        finally:
            for pipe in (tool.stdout, tool.stderr):
                if pipe is not None:
                    pipe.close()
            reaped = self._tools.finish(tool)
        if not reaped:
            return Outcome(f"{name} survived SIGKILL")
        if not ended:
            why = "this daemon ends" if abort.is_set() else f"{self._deadline_s:g} s were over"
            return Outcome(f"{name} was killed: {why}")
        return Outcome(_problem(name, tool.returncode, tail))

    def _start(self, body: bytes) -> subprocess.Popen[bytes]:
        # A file in memory: a command that does not read its stdin cannot hold us up.
        fd = os.memfd_create("stallwatch-notice", os.MFD_CLOEXEC)
        try:
            os.write(fd, body)
            os.lseek(fd, 0, os.SEEK_SET)
            return self._tools.start(self._argv, stdin=fd)
        finally:
            os.close(fd)


def _watch(
    tool: subprocess.Popen[bytes], until: float, abort: threading.Event
) -> tuple[bool, bytes]:
    """(it ended by itself, the end of what it said: on stderr, else on stdout)."""
    tails = {pipe.fileno(): b"" for pipe in (tool.stderr, tool.stdout) if pipe is not None}
    pidfd = os.pidfd_open(tool.pid)
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(pidfd, selectors.EVENT_READ)
            for fd in tails:
                os.set_blocking(fd, False)
                selector.register(fd, selectors.EVENT_READ)
            while not abort.is_set() and (left := until - time.monotonic()) > 0:
                ready = {key.fd for key, _ in selector.select(min(left, _LOOK_S))}
                for fd in ready - {pidfd}:
                    got = _read(fd)
                    if got == b"":
                        selector.unregister(fd)
                    tails[fd] = (tails[fd] + (got or b""))[-_TAIL:]
                # Its end decides, once what it had written is read. What a child of it goes on
                # writing ends with the deadline.
                if pidfd in ready and not _writing(selector, pidfd):
                    return True, next(filter(None, tails.values()), b"")
            return False, b""
    finally:
        os.close(pidfd)


def _writing(selector: selectors.BaseSelector, pidfd: int) -> bool:
    """Output waits to be read."""
    return any(key.fd != pidfd for key, _ in selector.select(0))


def _read(fd: int) -> bytes | None:
    """B'' at the end, None when nothing is there after all."""
    try:
        return os.read(fd, _CHUNK)
    except BlockingIOError:
        return None


def _problem(name: str, status: int, tail: bytes) -> str:
    if status == 0:
        return ""
    how = f"was ended by signal {-status}" if status < 0 else f"exited with status {status}"
    lines = tail.decode("utf-8", "replace").strip().splitlines()
    return f"{name} {how}: {lines[-1][-300:]}" if lines else f"{name} {how}"
