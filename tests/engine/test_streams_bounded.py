"""Waits by asking: never longer than allowed, and hardly longer than they take."""

from __future__ import annotations

import math
import statistics
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallwatch_engine.streams.bounded import FINE_S, Expectation, wait_for, wait_until


class FakeTime:
    """A clock that only sleeping moves; each query costs 10 us and each sleep 60 us more than asked."""

    def __init__(self) -> None:
        self.now = 100.0
        self.queries = 0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + 60e-6

    def wait(self, takes: float, expected: Expectation | None = None, limit: float = 10.0) -> float:
        """Wait for something that is done `takes` seconds from now; the overshoot."""
        end = self.now + takes

        def query() -> bool:
            self.queries += 1
            self.now += 10e-6
            return self.now >= end

        wait_until(
            query,
            self.now + limit,
            operation="the copy",
            expected=expected,
            clock=self.clock,
            sleep=self.sleep,
        )
        return self.now - end


@pytest.mark.parametrize("seconds", [0, -1, -0.0, math.nan, math.inf, -math.inf])
def test_an_unusable_timeout_is_refused_before_any_query(seconds):
    """A deadline that is none must not look like one, and must not touch the device."""
    asked = []
    with pytest.raises(ValueError, match="positive"):
        wait_for(lambda: asked.append(1) or True, seconds, operation="the copy")
    assert asked == []


@pytest.mark.parametrize("deadline", [math.nan, math.inf])
def test_a_deadline_that_never_comes_is_refused_before_any_query(deadline):
    """NaN compares false with everything: such a wait would have no end."""
    asked = []
    with pytest.raises(ValueError, match="never comes"):
        wait_until(lambda: asked.append(1) or True, deadline, operation="the copy")
    assert asked == []


def test_the_error_names_the_operation_and_comes_on_time():
    """Not a poll later than the deadline, and at once when the deadline is past."""
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="the copy of step 3 did not complete within"):
        wait_for(lambda: False, 0.05, operation="the copy of step 3")
    assert time.monotonic() - began >= 0.05
    fake = FakeTime()
    with pytest.raises(TimeoutError):
        fake.wait(5.0, limit=0.5)
    assert fake.now - 100.5 < 0.002
    with pytest.raises(TimeoutError):
        fake.wait(5.0, limit=-1.0)


def test_what_is_complete_at_a_past_deadline_counts():
    """A thread that did not get to run must not turn a finished copy into a failure."""
    fake = FakeTime()
    assert fake.wait(-1.0, limit=-0.5) >= 0


def test_a_query_that_raises_fails_at_once():
    """A sticky device error is not polled until the deadline."""

    def broken() -> bool:
        raise RuntimeError("device lost")

    with pytest.raises(RuntimeError, match="device lost"):
        wait_for(broken, 60.0, operation="the copy")


@pytest.mark.parametrize("learned", [False, True])
def test_waits_of_2_to_8_ms_overshoot_by_less_than_a_millisecond_on_average(learned):
    """The doubling ladder that this replaces adds 2.5 ms to them."""
    fake, habit = FakeTime(), Expectation() if learned else None
    overshoots = [fake.wait(ms / 1e3, habit) for ms in [2, 8, 3, 7, 4, 6, 5] * 20]
    assert sum(overshoots) / len(overshoots) < 0.001
    assert max(overshoots) < 0.0015


def test_a_wait_that_is_known_to_be_long_costs_few_queries():
    """Polling finely from the start would ask 2,000 times in 300 ms."""
    fake, habit = FakeTime(), Expectation(0.3)
    fake.wait(0.3, habit)
    assert fake.queries < 400


@given(st.floats(0.0, 5.0), st.floats(1e-6, 2.0))
def test_no_pause_is_longer_than_a_millisecond_or_shorter_than_nothing(waited, expected):
    """Whatever was learned, the overshoot of one wait stays under one sleep."""
    assert 0 < Expectation(expected).pause(waited) <= 0.001


@pytest.mark.slow
def test_real_waits_overshoot_by_less_than_their_bar():
    """On the real clock: under 1 ms, or under two of the shortest sleeps where one alone takes that long."""
    habit, overshoots, sleeps = Expectation(), [], []
    for n in range(60):
        began = time.monotonic()
        time.sleep(FINE_S)
        sleeps.append(time.monotonic() - began)
        end = time.monotonic() + (2 + n % 7) / 1e3
        wait_for(lambda end=end: time.monotonic() >= end, 5.0, operation="a wait", expected=habit)
        overshoots.append(time.monotonic() - end)
    assert statistics.median(overshoots) < max(0.001, 2 * statistics.median(sleeps))
