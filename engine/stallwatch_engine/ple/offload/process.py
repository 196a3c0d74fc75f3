"""Starting and ending the offload process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

STEP_S = 5.0  # each of: hang up and wait, SIGTERM and wait, SIGKILL and wait


class OffloadProcess:
    """A child that serves `ranks` ranks, and ends with this process.

    Started from the main thread the kernel sees to that as well; another thread may end before its
    process, and would take the child with it.
    """

    def __init__(
        self, factory: str, spec: Mapping[str, Any], *, ranks: int = 1, cpus: str = ""
    ) -> None:
        if ranks < 1:
            raise ValueError(f"ranks={ranks}; expected at least 1")
        ours, theirs = [], []
        for _ in range(ranks):
            mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.append(mine)
            theirs.append(its)
        read_end, self._death_fd = os.pipe()
        try:
            fds = [sock.fileno() for sock in theirs]
            command = _command(factory, spec, fds, read_end)
            if threading.current_thread() is threading.main_thread():
                command.append("--death-signal")
            if cpus:
                command += ["--cpus", cpus]
            self._child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[*fds, read_end]
            )
        except BaseException:
            for sock in ours:
                sock.close()
            os.close(self._death_fd)
            raise
        finally:
            for sock in theirs:
                sock.close()
            os.close(read_end)
        self.sockets = ours
        self.pid = self._child.pid
        self.pidfd = os.pidfd_open(self.pid)  # not reaped yet: the number is still its own
        self._closed = False

    def status(self) -> str:
        """How it ended, in words; "running" if it has not."""
        code = self._child.poll()
        if code is None:
            return "running"
        if code < 0:
            return f"signal {signal.Signals(-code).name}"
        return f"exit status {code}"

    def close(self) -> str:
        """Hang up, then SIGTERM, then SIGKILL, 5 s each; how it ended. Safe to call again."""
        if self._closed:
            return self.status()
        self._closed = True
        for sock in self.sockets:
            sock.close()
        for sig in (None, signal.SIGTERM, signal.SIGKILL):
            if sig is not None:
                self._child.send_signal(sig)
            try:
                self._child.wait(STEP_S)
                break
            except subprocess.TimeoutExpired:
                continue
        os.close(self._death_fd)
        os.close(self.pidfd)
        return self.status()


def _command(
    factory: str, spec: Mapping[str, Any], rank_fds: Sequence[int], death_fd: int
) -> list[str]:
    return [
        sys.executable,
        "-m",
        "stallwatch_engine.ple.offload.main",
        f"--factory={factory}",
        f"--spec={json.dumps(spec)}",
        f"--rank-fds={','.join(map(str, rank_fds))}",
        f"--death-fd={death_fd}",
        f"--parent={os.getpid()}",
    ]
