"""Ending with the parent. Two independent ways, because each has a hole.

The kernel's parent-death signal follows the THREAD that spawned us, and comes too early when that thread
ends before its process. The pipe closes only when every copy of its other end is gone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading

PR_SET_PDEATHSIG = 1


def watch(death_fd: int, parent: int, *, signalled: bool) -> None:
    """End this process at once when the parent ends, and now if it has.

    `signalled`: the thread that spawned us lives as long as its process, so the kernel may signal us.
    """
    threading.Thread(target=_watch, args=(death_fd,), name="parent-watch", daemon=True).start()
    if signalled:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the signal was asked for
        os._exit(1)


def _watch(death_fd: int) -> None:
    while os.read(death_fd, 64):
        pass
    os._exit(1)  # no clean-up: shared memory and sockets go with the process
