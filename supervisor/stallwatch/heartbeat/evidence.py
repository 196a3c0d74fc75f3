"""What a process prepares at attach so that it can be examined later without privileges."""

from __future__ import annotations

import faulthandler
import os

from stallwatch.heartbeat.layout import DUMPS, P_DUMP_SIZE
from stallwatch.heartbeat.memory import BoardMemory
from stallwatch.heartbeat.proc import start_ticks

_PR_SET_PTRACER = 0x59616D61  # "Yama"
_open_dump = -1


def allow_tracing(memory: BoardMemory) -> None:
    """Let descendants of the supervisor attach under Yama 1, once /proc says that it is the one.

    The pid alone would not do: a recycled one would open this process to a stranger.
    """
    pid, ticks = memory.supervisor_pid, memory.supervisor_ticks
    if pid <= 1 or ticks == 0 or start_ticks(pid) != ticks:
        return
    try:
        import ctypes  # noqa: PLC0415  (7 ms, needed only here)

        # EINVAL without Yama, which needs nothing then.
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)
    except Exception:
        return


def register_dump(memory: BoardMemory, number: int) -> tuple[int, str]:
    """Let that signal write all stacks to a file in the board folder: (signal, file name).

    (0, "") when it is not possible, or when somebody else already listens to the signal. SIGURG is
    the default because a process that did not attach ignores it; SIGUSR2 would kill it.
    """
    global _open_dump
    try:
        import signal  # noqa: PLC0415  (brings enum: 2 ms)

        if number == 0 or (_open_dump < 0 and signal.getsignal(number) != signal.SIG_DFL):
            return 0, ""
        name = f"{os.getpid()}-{start_ticks(os.getpid())}.txt"
        if len(name) > P_DUMP_SIZE:
            return 0, ""
        # O_APPEND, so that the supervisor may truncate the file between two dumps.
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(f"{memory.folder}/{DUMPS}/{name}", flags, 0o600)
        faulthandler.register(number, fd, all_threads=True, chain=False)
        if _open_dump >= 0:  # a fork's copy of its parent's, or an older board's
            os.close(_open_dump)
        _open_dump = fd
        return number, name
    except Exception:
        return 0, ""
