"""The report of a run: what JSON and CSV hold, and the exit code. Pure."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from typing import Any

from stallwatch_engine.bench.breaker import Breaker, State
from stallwatch_engine.bench.gate import ERRORS, Judged
from stallwatch_engine.bench.plan import Plan
from stallwatch_engine.bench.result import Result
from stallwatch_engine.bench.summary import SHOWN, Spread, Summary
from stallwatch_engine.bench.target import Target

SCHEMA = 1
OK, FAILED, GATE, TIMED_OUT, INTERRUPTED = 0, 1, 3, 124, 130
_DERIVED = ("timed_out", "queue_s", "tpot_s")
COLUMNS = (*(each.name for each in fields(Result)), *_DERIVED)


@dataclass(frozen=True, slots=True)
class Report:
    """One run. results: in request order, with placeholders for what did not run to its end.

    ended_early: a stop was asked for (`--duration`), so what was not sent is no part of it.
    """

    plan: Plan
    target: Target
    results: tuple[Result, ...]
    summary: Summary
    breaker: Breaker
    gates: tuple[Judged, ...] = ()
    ended_early: bool = False

    @property
    def exit_code(self) -> int:
        """130 interrupted, 124 the breaker opened, 3 a gate failed, 1 a request did not complete, else 0."""
        if self.breaker.state is State.INTERRUPTED:
            return INTERRUPTED
        if self.breaker.state is State.TRIPPED:
            return TIMED_OUT
        if not all(judged.passed for judged in self.gates):
            return GATE
        counts = self.summary.counts
        allowed = any(judged.gate.name == ERRORS for judged in self.gates)
        whole = not counts.partial and counts.completed and (allowed or not counts.errors)
        return OK if whole else FAILED

    @property
    def passed(self) -> bool:
        return self.exit_code == OK

    def to_json(self) -> dict[str, Any]:
        """Keys are an interface; durations in seconds; null where nothing was measured."""
        summary, cause = self.summary, self.breaker.cause
        return {
            "schema": SCHEMA,
            "exit_code": self.exit_code,
            "url": self.target.base,
            "model": self.target.model,
            "endpoint": self.target.endpoint,
            "stream": self.target.stream,
            "mode": self.plan.mode,
            "concurrency": self.plan.concurrency,
            "ended_early": self.ended_early,
            "counts": asdict(summary.counts),
            "breaker": {
                "fail_fast_on_timeout": self.breaker.fail_fast,
                "state": str(self.breaker.state),
                "request": None if cause is None else cause.request,
                "timeout": None if cause is None else str(cause.kind),
            },
            "duration_s": summary.duration_s,
            "prompt_tokens": summary.prompt_tokens,
            "output_tokens": summary.output_tokens,
            "requests_per_s": summary.requests_per_s,
            "tokens_per_s": summary.tokens_per_s,
            "error_rate": summary.error_rate,
            "accuracy": summary.accuracy,
            "latency_s": {name: _spread(spread) for name, spread in summary.latency.items()},
            "gates": [_judged(judged) for judged in self.gates],
            "requests": [row(result) for result in self.results],
        }

    def to_csv(self) -> str:
        """One line per request, in request order; empty cells where nothing was measured."""
        out = io.StringIO()
        writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for result in self.results:
            writer.writerow(row(result))
        return out.getvalue()


def row(result: Result) -> dict[str, Any]:
    """A result with its derived figures, as JSON values."""
    found: dict[str, Any] = {name: getattr(result, name) for name in COLUMNS}
    found["outcome"] = str(result.outcome)
    found["timeout"] = None if result.timeout is None else str(result.timeout)
    return found


def _spread(spread: Spread) -> dict[str, Any]:
    return {
        "count": spread.count,
        "mean": spread.mean,
        "max": spread.greatest if spread.count else None,
        **{f"p{percent}": spread.percentile(Fraction(percent)) for percent in SHOWN},
    }


def _judged(judged: Judged) -> dict[str, Any]:
    known = judged.measured is not None and math.isfinite(judged.measured)
    return {
        "name": judged.gate.name,
        "limit": judged.gate.limit,
        "at_least": judged.gate.at_least,
        "measured": judged.measured if known else None,
        "passed": judged.passed,
        "reason": judged.reason,
    }
