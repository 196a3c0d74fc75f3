"""A run in figures: latencies of its completed requests, throughput, rates. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from stallwatch_engine.bench.histogram import Histogram, rank
from stallwatch_engine.bench.result import Outcome, Result

SHOWN = (50, 90, 95, 99)  # percentiles of tables and JSON


class Spread(Protocol):
    """Durations in seconds of which percentiles can be asked."""

    @property
    def count(self) -> int: ...
    @property
    def mean(self) -> float | None: ...
    @property
    def greatest(self) -> float: ...
    def percentile(self, percent: Fraction) -> float | None:
        """The nearest-rank value: one that was measured, never a mixture of two."""


class Values:
    """All values, for percentiles without error."""

    def __init__(self, values: Iterable[float | None]) -> None:
        self._sorted = sorted(value for value in values if value is not None)

    @property
    def count(self) -> int:
        return len(self._sorted)

    @property
    def mean(self) -> float | None:
        return sum(self._sorted) / self.count if self._sorted else None

    @property
    def greatest(self) -> float:
        return self._sorted[-1] if self._sorted else 0.0

    def percentile(self, percent: Fraction) -> float | None:
        if not self._sorted:
            return None
        return self._sorted[rank(self.count, percent) - 1]


@dataclass(frozen=True, slots=True)
class Counts:
    """Requests by how they ended. sent: begun; the others are placeholders among `cancelled`."""

    planned: int
    sent: int
    completed: int
    timed_out: int
    errors: int
    cancelled: int

    @property
    def partial(self) -> bool:
        """Some answers are missing because time ran out or the run was stopped."""
        return bool(self.timed_out or self.cancelled)


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures over completed requests only.

    duration_s: first request sent to last one ended. latency: `ttft` (to the first text), `itl`
    (gaps between pieces), `tpot` (per token after the first), `e2e` (sent to end), `queue` (due
    to sent), `response` (due to end). accuracy: share of the requests with an expectation, ended
    in whatever way, whose answer held it; None when there were none.
    """

    counts: Counts
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    latency: dict[str, Spread]
    accuracy: float | None

    @property
    def requests_per_s(self) -> float | None:
        return self.counts.completed / self.duration_s if self.duration_s > 0 else None

    @property
    def tokens_per_s(self) -> float | None:
        """Output tokens of completed requests per second of the run."""
        return self.output_tokens / self.duration_s if self.duration_s > 0 else None

    @property
    def error_rate(self) -> float | None:
        """Share of the planned requests that ended in an error other than a timeout."""
        return self.counts.errors / self.counts.planned if self.counts.planned else None


def counted(results: Sequence[Result]) -> Counts:
    """How many requests ended in which way."""
    by = Counter(result.outcome for result in results)
    return Counts(
        planned=len(results),
        sent=sum(result.sent_s is not None for result in results),
        completed=by[Outcome.COMPLETED],
        timed_out=by[Outcome.TIMED_OUT],
        errors=by[Outcome.ERROR],
        cancelled=by[Outcome.CANCELLED],
    )


def summarise(results: Sequence[Result], gaps: Histogram, duration_s: float) -> Summary:
    """The figures of a run. gaps: inter-token latencies of its completed requests."""
    done = [result for result in results if result.outcome is Outcome.COMPLETED]
    expected = [result.matched for result in results if result.matched is not None]
    latency: dict[str, Spread] = {
        "ttft": Values(result.ttft_s for result in done),
        "itl": gaps,
        "tpot": Values(result.tpot_s for result in done),
        "e2e": Values(result.e2e_s for result in done),
        "queue": Values(result.queue_s for result in done),
        "response": Values(
            (result.queue_s or 0.0) + result.e2e_s for result in done if result.e2e_s is not None
        ),
    }
    return Summary(
        counts=counted(results),
        duration_s=duration_s,
        prompt_tokens=sum(result.prompt_tokens or 0 for result in done),
        output_tokens=sum(result.output_tokens for result in done),
        latency=latency,
        accuracy=sum(expected) / len(expected) if expected else None,
    )
