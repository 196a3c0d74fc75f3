"""Waiting for something that can only be asked, never longer than allowed and hardly longer than it takes.

A ladder of sleeps that doubles from 0.1 ms to 10 ms was measured to add 2.5 ms to waits of 2 to 8 ms.
Here no sleep is longer than 1 ms, and around the time that earlier waits took the polls are dense, so
the overshoot of a wait stays a fraction of a millisecond while a long wait costs few queries.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

FINE_S = 0.0001
COARSE_S = 0.001
DENSE_S = 0.010  # waits as short as a decode step are polled finely from the start
GUARD_S = 0.002  # fine polling begins this long before the expected end
SHARE = 0.02  # beyond the expected end a sleep is this share of the time waited
_WEIGHT = 0.2  # of the newest wait in the moving average


def check_timeout(seconds: float, name: str = "timeout") -> float:
    """The seconds; ValueError when they are no positive finite number."""
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"{name}={seconds} is no deadline: give a positive number of seconds")
    return seconds


def check_deadline(deadline: float) -> float:
    """The point in time; ValueError when it is not finite. A point in the past is allowed."""
    if not math.isfinite(deadline):
        raise ValueError(f"deadline={deadline} never comes: give a finite time.monotonic() value")
    return deadline


@dataclass(slots=True)
class Expectation:
    """What the same wait usually takes: a moving average in seconds, 0 before the first."""

    seconds: float = 0.0

    def learn(self, took: float) -> None:
        """Count a wait that ended well."""
        self.seconds += (took - self.seconds) * (_WEIGHT if self.seconds else 1.0)

    def pause(self, waited: float) -> float:
        """How long to sleep before the next query, in seconds."""
        if not self.seconds and waited < DENSE_S:
            return FINE_S
        if waited < self.seconds - GUARD_S:
            return min(COARSE_S, self.seconds - GUARD_S - waited)
        if waited < self.seconds + GUARD_S:
            return FINE_S
        return min(max(waited * SHARE, FINE_S), COARSE_S)


def wait_until(
    query: Callable[[], bool],
    deadline: float,
    *,
    operation: str,
    expected: Expectation | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return when `query()` says done; TimeoutError naming the operation at the deadline.

    A query that raises fails the wait at once. A deadline that is not finite is refused before the
    first query; one in the past still gets one query.
    """
    check_deadline(deadline)
    began = clock()
    habit = expected if expected is not None else Expectation()
    while not query():
        now = clock()
        if now >= deadline:
            if query():  # completed while this thread did not get to run
                break
            raise TimeoutError(f"{operation} did not complete within {deadline - began:.3g} s")
        sleep(min(habit.pause(now - began), deadline - now))
    habit.learn(clock() - began)


def wait_for(
    query: Callable[[], bool],
    timeout_s: float,
    *,
    operation: str,
    expected: Expectation | None = None,
) -> None:
    """The same with seconds from now; ValueError for zero, negative, NaN or infinite ones."""
    check_timeout(timeout_s)
    wait_until(query, time.monotonic() + timeout_s, operation=operation, expected=expected)
