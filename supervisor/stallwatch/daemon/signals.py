"""Signals, as words in a queue: handlers do nothing else. The main thread reads them."""

from __future__ import annotations

import os
import select
import signal
from collections import deque
from collections.abc import Iterator
from types import FrameType

WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


class Signals:
    """A wake-up pipe: CPython writes each signal's number into it, `wait` reads them."""

    def __init__(self) -> None:
        self._came: deque[int] = deque()
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._old_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._old = {number: signal.signal(number, _nothing) for number in WATCHED}

    def wait(self, timeout_s: float) -> Iterator[int]:
        """The numbers that came, after at most `timeout_s`. What is not taken comes the next time."""
        ready, _, _ = select.select([self._read], [], [], 0 if self._came else timeout_s)
        if ready:
            self._came.extend(os.read(self._read, 4096))
        while self._came:
            yield self._came.popleft()

    def wake(self) -> None:
        """End a wait from another thread."""
        try:
            os.write(self._write, b"\0")
        except BlockingIOError:
            pass  # full: it is awake already

    def close(self) -> None:
        """Give the handlers back."""
        signal.set_wakeup_fd(self._old_fd)
        for number, handler in self._old.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)


def _nothing(_number: int, _frame: FrameType | None) -> None:
    """Python needs a handler for the wake-up byte to be written."""
