"""When each request is due, in seconds from the start of the run: never decreasing, first one at 0. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

from stallwatch_engine.bench.errors import PlanRefused

Arrivals = tuple[float, ...]


def immediate(count: int) -> Arrivals:
    """All at once; the concurrency alone holds them back."""
    return (0.0,) * count


def constant(count: int, rate: float) -> Arrivals:
    """One every 1/rate seconds. rate: requests per second, finite and above 0."""
    _check_rate(rate)
    return tuple(index / rate for index in range(count))


def poisson(count: int, rate: float, seed: int) -> Arrivals:
    """Exponential gaps of mean 1/rate seconds: independent clients. Equal seeds give equal times."""
    _check_rate(rate)
    # A stream of its own: how many prompts were drawn must not shift the arrivals.
    draw = random.Random(f"arrivals-{seed}")
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += draw.expovariate(rate)
    return tuple(times)


def self_timed(times: Iterable[float | None], scale: float = 1.0) -> Arrivals:
    """The times of a trace, its first one moved to 0.

    scale: 2.0 plays the trace at half its speed. PlanRefused names the first request without a
    time, with a time that is no number, or earlier than the one before it.
    """
    if not (math.isfinite(scale) and scale > 0):
        raise PlanRefused("time scale", f"{scale} is not above 0")
    found: list[float] = []
    for index, at in enumerate(times):
        where = f"request {index} of the trace"
        if at is None or not math.isfinite(at) or at < 0:
            raise PlanRefused(where, f"`at` is {at}", hint="give seconds from the start, 0 or more")
        if found and at < found[-1]:
            raise PlanRefused(where, f"{at} comes after {found[-1]}", hint="sort the trace by `at`")
        found.append(at)
    return tuple((at - found[0]) * scale for at in found)


def _check_rate(rate: float) -> None:
    if not (math.isfinite(rate) and rate > 0):
        raise PlanRefused(
            "request rate", f"{rate} is not above 0", hint="leave it out for no limit"
        )
