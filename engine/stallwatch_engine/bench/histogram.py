"""Durations in bounded memory: buckets 1 % wide, and a percentile never better than what was measured. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

GROWTH = 1.01
LEAST_S = 1e-6  # everything shorter counts as this
MOST_S = 1e6
_LOG = math.log(GROWTH)


def rank(count: int, percent: Fraction) -> int:
    """The nearest rank, 1-based: the smallest one with at least `percent` of `count` values at or under it."""
    return max(1, math.ceil(percent * count / 100))


class Histogram:
    """Counts by bucket; exact count, sum, least and greatest.

    A value lies in the bucket whose upper edge is the least power of 1.01 not under it, so a
    percentile read from the edge is at most 1 % above the exact nearest-rank value and not below it.
    """

    __slots__ = ("_buckets", "count", "greatest", "least", "total")

    def __init__(self, values: Iterable[float] = ()) -> None:
        self._buckets: dict[int, int] = {}
        self.count = 0
        self.total = 0.0
        self.least = math.inf
        self.greatest = 0.0
        for value in values:
            self.add(value)

    def add(self, seconds: float) -> None:
        """Count one duration, finite and not negative."""
        bounded = min(max(seconds, LEAST_S), MOST_S)
        bucket = math.ceil(math.log(bounded) / _LOG)
        if GROWTH**bucket < bounded:  # the logarithm was rounded down at an edge
            bucket += 1
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1
        self.count += 1
        self.total += seconds
        self.least = min(self.least, seconds)
        self.greatest = max(self.greatest, seconds)

    def merge(self, other: Histogram) -> None:
        """Count everything that the other one counted."""
        for bucket, count in other._buckets.items():
            self._buckets[bucket] = self._buckets.get(bucket, 0) + count
        self.count += other.count
        self.total += other.total
        self.least = min(self.least, other.least)
        self.greatest = max(self.greatest, other.greatest)

    def percentile(self, percent: Fraction) -> float | None:
        """The upper edge of the bucket that holds the nearest rank; None without a value."""
        if not self.count:
            return None
        left = rank(self.count, percent)
        for bucket in sorted(self._buckets):
            left -= self._buckets[bucket]
            if left <= 0:
                return min(max(GROWTH**bucket, self.least), self.greatest)
        return self.greatest

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    @property
    def buckets(self) -> int:
        """How many are held: the memory it takes."""
        return len(self._buckets)
