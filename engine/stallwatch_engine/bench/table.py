"""The report as lines for a person. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

from stallwatch_engine.bench.breaker import State
from stallwatch_engine.bench.gate import Judged
from stallwatch_engine.bench.report import Report
from stallwatch_engine.bench.result import Outcome
from stallwatch_engine.bench.summary import SHOWN, Spread
from stallwatch_engine.bench.units import show_seconds

_MOST_ERRORS = 5
_WIDTH = 9


def lines(report: Report) -> Iterator[str]:
    """What happened first, the figures, then the gates: the important last."""
    summary, counts = report.summary, report.summary.counts
    yield (
        f"{counts.completed} of {counts.planned} requests completed in "
        f"{show_seconds(summary.duration_s)} ({report.plan.mode}, "
        f"concurrency {report.plan.concurrency})"
    )
    if counts.completed != counts.planned:
        yield (
            f"{counts.timed_out} timed out, {counts.errors} failed, {counts.cancelled} cancelled "
            f"({counts.planned - counts.sent} of them never sent)"
        )
        yield from _errors(report)
    yield from _breaker(report)
    yield (
        f"{_rate(summary.requests_per_s)} requests/s, {_rate(summary.tokens_per_s)} tokens/s, "
        f"{summary.output_tokens} output tokens"
    )
    if summary.accuracy is not None:
        yield f"accuracy {summary.accuracy:.4g}"
    if any(spread.count for spread in summary.latency.values()):
        yield _row("", ["mean", *(f"p{percent}" for percent in SHOWN), "max"])
    for name, spread in summary.latency.items():
        if spread.count:
            yield _row(name, [show_seconds(value) for value in _figures(spread)])
    yield from (_gate(judged) for judged in report.gates)


def _figures(spread: Spread) -> list[float | None]:
    shown = [spread.percentile(Fraction(percent)) for percent in SHOWN]
    return [spread.mean, *shown, spread.greatest]


def _row(name: str, cells: list[str]) -> str:
    return f"{name:<8}" + "".join(f"{cell:>{_WIDTH}}" for cell in cells)


def _errors(report: Report) -> Iterator[str]:
    """The commonest ends, each with the first words said about it."""
    said: dict[str, str] = {}
    found: Counter[str] = Counter()
    for result in report.results:
        if result.outcome in (Outcome.TIMED_OUT, Outcome.ERROR):
            kind = str(result.timeout or result.code)
            found[kind] += 1
            said.setdefault(kind, result.error)
    for kind, count in found.most_common(_MOST_ERRORS):
        yield f"  {count} x {kind}: {said[kind]}"


def _breaker(report: Report) -> Iterator[str]:
    breaker = report.breaker
    if breaker.state is State.INTERRUPTED:
        yield "interrupted: these are partial results"
    elif breaker.cause is not None:
        cause = breaker.cause
        yield f"stopped by the first timeout: request {cause.request}, {cause.kind}"


def _gate(judged: Judged) -> str:
    gate = judged.gate
    limit = show_seconds(gate.limit) if gate.latency else f"{gate.limit:g}"
    side = ">=" if gate.at_least else "<="
    if judged.measured is None:
        measured = "-"
    else:
        measured = show_seconds(judged.measured) if gate.latency else f"{judged.measured:.4g}"
    verdict = "passed" if judged.passed else f"FAILED: {judged.reason}"
    return f"gate {gate.name} {measured} {side} {limit}: {verdict}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
