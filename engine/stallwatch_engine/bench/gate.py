"""Gates: conditions that a run must meet, and that a partial run never meets. Pure.

`ttft_p99=2s` is an upper bound, `tokens_per_s=100` a lower one: each figure has one sensible side.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction

from stallwatch_engine.bench.errors import PlanRefused
from stallwatch_engine.bench.summary import Counts, Summary
from stallwatch_engine.bench.units import parse_seconds

LATENCIES = ("ttft", "itl", "tpot", "e2e", "queue", "response")
AT_LEAST = ("tokens_per_s", "requests_per_s", "accuracy")
ERRORS = "error_rate"
_SHARES = ("accuracy", ERRORS)
_STATISTIC = re.compile(
    r"(?P<latency>[a-z0-9]+)_(?P<statistic>mean|max|p(?P<percent>\d{1,2}(\.\d{1,4})?|100))"
)


@dataclass(frozen=True, slots=True)
class Gate:
    """name: the figure as written. limit: seconds, a rate or a share. percent: of a percentile gate."""

    name: str
    limit: float
    latency: str = ""
    statistic: str = ""
    percent: Fraction | None = None

    @property
    def at_least(self) -> bool:
        return self.name in AT_LEAST

    def measured(self, summary: Summary) -> float | None:
        """The figure in this run; None when nothing was measured."""
        if not self.latency:
            found = getattr(summary, self.name)
            return None if found is None else float(found)
        spread = summary.latency[self.latency]
        if not spread.count:
            return None
        if self.percent is not None:
            return spread.percentile(self.percent)
        return spread.greatest if self.statistic == "max" else spread.mean


@dataclass(frozen=True, slots=True)
class Judged:
    """A gate after a run. reason: why it did not pass, empty when it did."""

    gate: Gate
    measured: float | None
    reason: str

    @property
    def passed(self) -> bool:
        return not self.reason


def parse_gate(text: str) -> Gate:
    """`NAME=LIMIT`. PlanRefused says which names there are."""
    name, equals, value = (part.strip() for part in text.partition("="))
    where = f"gate {text!r}"
    if not equals or not value:
        raise PlanRefused(where, "it has no limit", hint="write it like ttft_p99=2s")
    if name in (*AT_LEAST, ERRORS):
        return Gate(name, _number(where, value, share=name in _SHARES))
    found = _STATISTIC.fullmatch(name)
    if found is None or found["latency"] not in LATENCIES:
        raise PlanRefused(where, f"no figure {name!r}", hint=_hint(name))
    seconds = parse_seconds(value)
    if seconds is None or seconds <= 0:
        raise PlanRefused(where, f"{value!r} is no duration", hint="write 2s, 250ms or 1m30s")
    percent = Fraction(found["percent"]) if found["percent"] else None
    return Gate(name, seconds, found["latency"], found["statistic"], percent)


def judge(gates: Sequence[Gate], summary: Summary) -> tuple[Judged, ...]:
    """Each gate's outcome. None passes when the run is partial, whatever was measured."""
    allowed = any(gate.name == ERRORS for gate in gates)
    missing = _missing(summary.counts, errors_allowed=allowed)
    return tuple(_judge(gate, summary, missing) for gate in gates)


def _judge(gate: Gate, summary: Summary, missing: str) -> Judged:
    measured = gate.measured(summary)
    if missing:
        return Judged(gate, measured, missing)
    if measured is None:
        return Judged(gate, None, "nothing was measured")
    good = measured >= gate.limit if gate.at_least else measured <= gate.limit
    side = "under" if gate.at_least else "over"
    return Judged(gate, measured, "" if good else f"{measured:.6g} is {side} {gate.limit:g}")


def _missing(counts: Counts, *, errors_allowed: bool) -> str:
    """Why the results are no whole; empty when they are."""
    kinds = {"timed out": counts.timed_out, "cancelled": counts.cancelled}
    if not errors_allowed:
        kinds["failed"] = counts.errors
    lost = [f"{count} {kind}" for kind, count in kinds.items() if count]
    if lost:
        return f"{', '.join(lost)} of {counts.planned}: partial results pass no gate"
    return "" if counts.completed else "no request completed"


def _number(where: str, value: str, *, share: bool) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0 or (share and number > 1):
        kind = "a share from 0 to 1" if share else "a number, 0 or more"
        raise PlanRefused(where, f"{value!r} is not {kind}")
    return number


def _hint(name: str) -> str:
    known = [*AT_LEAST, ERRORS, *(f"{each}_p99" for each in LATENCIES)]
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    said = f"did you mean {near[0]}? " if near else ""
    return (
        f"{said}there are {', '.join((*AT_LEAST, ERRORS))}, and "
        f"{'|'.join(LATENCIES)} with _mean, _max or _pN"
    )
