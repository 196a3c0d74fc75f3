"""Faults of the worker itself, for tests."""

from __future__ import annotations

import ctypes
import os
import signal

from stallwatch_engine.faults import Faults


def inject(faults: Faults, step: int) -> None:
    """What is to go wrong before that step is launched; nothing in production."""
    if not faults.items:
        return
    if faults.hit("worker.crash", step):
        os.kill(os.getpid(), signal.SIGKILL)
    held = faults.hit("worker.hold_gil", step)
    if held is not None:
        # PyDLL, unlike CDLL, keeps the GIL during the call; usleep takes less than a second at a time
        for _ in range(max(1, int(held.milliseconds // 500))):
            ctypes.PyDLL(None).usleep(int(min(held.milliseconds, 500) * 1000))
