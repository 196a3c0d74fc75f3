"""What a run will do: its requests in order, when each is due, how many at once."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from stallwatch_engine.bench.arrivals import Arrivals
from stallwatch_engine.bench.errors import PlanRefused
from stallwatch_engine.bench.prompt import Prompt

MAX_REQUESTS = 250_000  # a result is kept for each, in order: about 2 KB
MAX_CONCURRENCY = 4096  # one connection each


@dataclass(frozen=True, slots=True)
class Plan:
    """prompts[i] is due arrivals[i] seconds after the start; at most `concurrency` are in flight.

    mode: how the arrivals came about, for the report only.
    """

    prompts: tuple[Prompt, ...]
    arrivals: Arrivals
    concurrency: int
    mode: str = "immediate"

    def __post_init__(self) -> None:
        if len(self.prompts) != len(self.arrivals):
            counts = f"{len(self.prompts)} prompts, {len(self.arrivals)} arrivals"
            raise PlanRefused("plan", counts)
        if not 1 <= len(self.prompts) <= MAX_REQUESTS:
            raise PlanRefused("requests", f"{len(self.prompts)} is not in 1..{MAX_REQUESTS}")
        if not 1 <= self.concurrency <= MAX_CONCURRENCY:
            raise PlanRefused("concurrency", f"{self.concurrency} is not in 1..{MAX_CONCURRENCY}")
        # NaN compares false with everything, so it is refused here too.
        if not (
            self.arrivals[0] >= 0 and all(a <= b for a, b in itertools.pairwise(self.arrivals))
        ):
            raise PlanRefused("arrivals", "they decrease, or are no numbers")
