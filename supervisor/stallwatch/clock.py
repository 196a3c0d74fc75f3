"""The two clocks: monotonic time decides, wall time is only shown."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Time as an injected thing, so that tests own it."""

    def monotonic_ns(self) -> int:
        """CLOCK_MONOTONIC in nanoseconds: the only time that decisions use."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch, for people and for ids. Never compared."""
        ...


class SystemClock:
    """The machine's clocks."""

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()

    def wall(self) -> float:
        return time.time()


def seconds(ns: int) -> float:
    """Nanoseconds as seconds."""
    return ns / 1e9


def nanoseconds(s: float) -> int:
    """Seconds as nanoseconds."""
    return int(s * 1e9)
