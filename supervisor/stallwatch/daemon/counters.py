"""Totals since the daemon started. One lock, held for arithmetic only."""

from __future__ import annotations

import threading
from collections import Counter, deque

from stallwatch.control.service import Counters

_SAMPLES = 10_000  # latencies kept between two scrapes


class Totals:
    """Counts by name and labels, and the two latencies. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, Counter[tuple[str, ...]]] = {}
        self._latencies: dict[str, deque[tuple[str, float]]] = {
            name: deque(maxlen=_SAMPLES) for name in ("detection", "answer")
        }

    def add(self, name: str, *labels: str, by: int = 1) -> None:
        """Count one more: `name` is a field of Counters, labels are its key."""
        with self._lock:
            self._counts.setdefault(name, Counter())[labels] += by

    def observe(self, name: str, engine: str, seconds_: float) -> None:
        """One latency: 'detection' (limit to confirmed) or 'answer' (confirmed to answered)."""
        with self._lock:
            self._latencies[name].append((engine, seconds_))

    def read(self, *, looks: int, late_looks: int, log_dropped: dict[str, int]) -> Counters:
        """The totals; the latencies are drained, so that each is exported once."""
        with self._lock:
            drained = {name: list(kept) for name, kept in self._latencies.items()}
            for kept in self._latencies.values():
                kept.clear()
            return Counters(
                stalls=self._pairs("stalls"),
                restarts=self._pairs("restarts"),
                captures=self._pairs("captures"),
                repeated=self._pairs("repeated"),
                withdrawn=self._singles("withdrawn"),
                exits=self._singles("exits"),
                extensions=self._singles("extensions"),
                log_dropped=log_dropped,
                looks=looks,
                late_looks=late_looks,
                detection_s=drained["detection"],
                answer_s=drained["answer"],
            )

    def _pairs(self, name: str) -> dict[tuple[str, str], int]:
        return {(str(k[0]), str(k[1])): n for k, n in self._counts.get(name, Counter()).items()}

    def _singles(self, name: str) -> dict[str, int]:
        return {str(k[0]): n for k, n in self._counts.get(name, Counter()).items()}
