"""A clock that stands still until it is told to move."""

from __future__ import annotations


class FakeClock:
    """Implements stallwatch.clock.Clock. Times in seconds at the edge, ns inside."""

    def __init__(self, start_s: float = 1000.0, *, wall: float = 1_790_000_000.0) -> None:
        self._ns = int(start_s * 1e9)
        self._wall = wall

    def monotonic_ns(self) -> int:
        return self._ns

    def wall(self) -> float:
        return self._wall

    def advance(self, seconds: float) -> int:
        """Move both clocks; returns the new monotonic time in ns."""
        self._ns += int(seconds * 1e9)
        self._wall += seconds
        return self._ns

    def step_wall(self, seconds: float) -> None:
        """An operator or NTP sets the wall clock: no decision may notice."""
        self._wall += seconds
