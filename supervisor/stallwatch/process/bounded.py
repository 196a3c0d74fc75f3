"""Reading /proc files that may block: maps and cmdline take the target's mmap lock.

A driver that hangs while it holds that lock (the case that ends as UNKILLABLE) blocks every reader
for ever, in a state no signal ends. So such reads happen in a thread that can be left behind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def bounded(read: Callable[[], T], seconds: float, default: T) -> T:
    """read(), or the default when it takes longer or raises OSError."""
    answer: list[T] = []

    def work() -> None:
        try:
            answer.append(read())
        except OSError:
            return

    thread = threading.Thread(target=work, name="bounded-read", daemon=True)
    thread.start()
    thread.join(seconds)
    return answer[0] if answer else default
