"""Percentiles, histograms, summaries, gates and exit codes: pure."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallwatch_engine.bench.arrivals import immediate
from stallwatch_engine.bench.breaker import Breaker, Interrupted, TimedOut
from stallwatch_engine.bench.errors import PlanRefused
from stallwatch_engine.bench.gate import judge, parse_gate
from stallwatch_engine.bench.histogram import GROWTH, LEAST_S, MOST_S, Histogram
from stallwatch_engine.bench.plan import Plan
from stallwatch_engine.bench.prompt import Prompt
from stallwatch_engine.bench.report import COLUMNS, Report
from stallwatch_engine.bench.result import Outcome, Result, placeholder
from stallwatch_engine.bench.summary import Values, summarise
from stallwatch_engine.bench.table import lines
from stallwatch_engine.bench.target import Target
from stallwatch_engine.bench.timeouts import TimeoutKind
from stallwatch_engine.bench.units import parse_seconds

DURATIONS = st.lists(st.floats(LEAST_S, 1e5), min_size=1, max_size=300)
PERCENTS = st.fractions(0, 100, max_denominator=1000)
GOOD = ("ttft_p99=1h", "itl_max=1h", "e2e_mean=1h", "tokens_per_s=0", "requests_per_s=0")


def result(index: int, outcome: Outcome, *, matched: bool | None = None) -> Result:
    if outcome is Outcome.CANCELLED:
        return placeholder(index, 0.0, expects=matched is not None)
    complete = outcome is Outcome.COMPLETED
    return Result(
        index,
        outcome,
        0.0,
        sent_s=0.0,
        ttft_s=0.1 * (index + 1),
        e2e_s=1.0 * (index + 1) if complete else None,
        output_tokens=10,
        timeout=TimeoutKind.TOTAL if outcome is Outcome.TIMED_OUT else None,
        code="x",
        matched=matched,
    )


def summary(results):
    return summarise(results, Histogram([0.01, 0.02]), 2.0)


def report(outcomes, gates=(), breaker=None) -> Report:
    results = tuple(result(index, outcome) for index, outcome in enumerate(outcomes))
    found = summary(results)
    plan = Plan((Prompt("x", 1),) * len(results), immediate(len(results)), 1)
    judged = judge([parse_gate(gate) for gate in gates], found)
    target = Target("http://127.0.0.1:1", "m")
    return Report(plan, target, results, found, breaker or Breaker(), judged)


# -- percentiles ---------------------------------------------------------------------------------


@given(values=DURATIONS, percent=PERCENTS)
def test_a_percentile_is_a_measured_value_that_covers_its_share(values, percent):
    """At least `percent` of the values are at or under it, and fewer at or under any smaller value."""
    found = Values(values).percentile(percent)
    assert found in values
    need = percent * len(values) / 100
    assert sum(value <= found for value in values) >= need
    smaller = [value for value in values if value < found]
    assert not smaller or sum(value <= max(smaller) for value in values) < need


@given(values=DURATIONS, percent=PERCENTS)
def test_the_histogram_never_flatters_and_is_one_percent_off_at_most(values, percent):
    """Its percentile lies between the exact nearest-rank value and 1 % more."""
    exact = Values(values).percentile(percent)
    found = Histogram(values).percentile(percent)
    assert exact <= found * (1 + 1e-12)
    assert found <= exact * GROWTH * (1 + 1e-9)


@given(one=DURATIONS, other=DURATIONS)
def test_merging_is_counting_all(one, other):
    """Two histograms merged are the histogram of both."""
    merged, both = Histogram(one), Histogram(one + other)
    merged.merge(Histogram(other))
    for percent in (0, 50, 99, 100):
        assert merged.percentile(Fraction(percent)) == both.percentile(Fraction(percent))
    assert merged.count == both.count
    assert merged.mean == pytest.approx(both.mean)
    assert merged.greatest == both.greatest


def test_the_histogram_stays_small():
    """However many values and however wide they lie, there is one bucket per percent of growth."""
    found = Histogram(1e-9 * 1.0007**n for n in range(60_000))
    assert found.count == 60_000
    assert found.buckets <= math.log(MOST_S / LEAST_S) / math.log(GROWTH) + 2


def test_nothing_measured_is_no_number():
    """Without a value there is neither a mean nor a percentile."""
    for empty in (Values([None]), Histogram()):
        assert empty.percentile(Fraction(50)) is None
        assert empty.mean is None
        assert empty.count == 0


# -- summaries -----------------------------------------------------------------------------------


@given(outcomes=st.lists(st.sampled_from(Outcome), min_size=1, max_size=40))
def test_counts_add_up_and_only_complete_requests_count_for_figures(outcomes):
    """Each request is in one count; tokens and latencies are those of completed requests."""
    found = summary([result(index, outcome) for index, outcome in enumerate(outcomes)])
    counts = found.counts
    total = counts.completed + counts.timed_out + counts.errors + counts.cancelled
    assert total == counts.planned == len(outcomes)
    assert counts.sent == len(outcomes) - outcomes.count(Outcome.CANCELLED)
    assert found.output_tokens == 10 * outcomes.count(Outcome.COMPLETED)
    assert found.latency["ttft"].count == outcomes.count(Outcome.COMPLETED)
    assert found.tokens_per_s == found.output_tokens / 2.0


# -- gates ---------------------------------------------------------------------------------------


@given(
    outcomes=st.lists(st.sampled_from(Outcome), min_size=1, max_size=20),
    gates=st.lists(st.sampled_from((*GOOD, "error_rate=1", "accuracy=0")), min_size=1, max_size=4),
)
def test_a_partial_run_passes_no_gate(outcomes, gates):
    """With gates that anything would meet, none passes once a request timed out or was cancelled."""
    results = [result(n, outcome, matched=True) for n, outcome in enumerate(outcomes)]
    judged = judge([parse_gate(gate) for gate in gates], summary(results))
    partial = {Outcome.TIMED_OUT, Outcome.CANCELLED} & set(outcomes)
    failed = Outcome.ERROR in outcomes and "error_rate=1" not in gates
    whole = not partial and not failed and Outcome.COMPLETED in outcomes
    assert all(each.passed == whole for each in judged)
    assert all(each.reason for each in judged if not each.passed)


@pytest.mark.parametrize(
    ("gate", "passed"),
    [
        ("ttft_p50=100ms", True),
        ("ttft_p50=99ms", False),
        ("ttft_max=200ms", True),
        ("ttft_p50.1=199ms", False),
        ("e2e_mean=1.5s", True),
        ("e2e_p100=1999ms", False),
        ("tokens_per_s=10", True),
        ("tokens_per_s=10.1", False),
        ("requests_per_s=1", True),
        ("error_rate=0", True),
        ("accuracy=0.5", False),
        ("tpot_p99=200ms", True),
        ("queue_max=1ms", True),
        ("response_p99=2s", True),
    ],
)
def test_each_gate_has_its_side(gate, passed):
    """Latencies and the error rate from above, throughput and accuracy from below; not measured fails."""
    assert report([Outcome.COMPLETED] * 2, [gate]).gates[0].passed is passed


@pytest.mark.parametrize(
    "text",
    ["", "ttft_p99", "ttft_p99=", "=1s", "tftf_p99=1s", "ttft_p101=1s", "ttft=1s", "ttft_p99=nan",
     "ttft_p99=0s", "ttft_p99=-1s", "tokens_per_s=inf", "tokens_per_s=-1", "accuracy=1.1",
     "error_rate=2", "error_rate=nan", "counts=1"],
)  # fmt: skip
def test_a_gate_that_cannot_be_meant_is_refused(text):
    """A misspelt figure or a limit that compares with nothing is an error before the run."""
    with pytest.raises(PlanRefused, match="gate"):
        parse_gate(text)


def test_a_misspelt_gate_names_the_nearest():
    """The error says what was probably meant."""
    with pytest.raises(PlanRefused, match="did you mean tokens_per_s"):
        parse_gate("token_per_s=1")


# -- reports -------------------------------------------------------------------------------------

TRIPPED = Breaker(fail_fast=True).step(TimedOut(1, TimeoutKind.CONNECT))
DONE, LATE, BAD, LOST = Outcome.COMPLETED, Outcome.TIMED_OUT, Outcome.ERROR, Outcome.CANCELLED


@pytest.mark.parametrize(
    ("outcomes", "gates", "breaker", "code"),
    [
        ([DONE, DONE], (), None, 0),
        ([DONE, DONE], GOOD, None, 0),
        ([DONE, DONE], ("ttft_max=1ms",), None, 3),
        ([DONE, BAD], (), None, 1),
        ([DONE, BAD], GOOD, None, 3),
        ([DONE, BAD], ("error_rate=0.5",), None, 0),
        ([DONE, BAD], ("error_rate=0.4",), None, 3),
        ([DONE, LATE], (), None, 1),
        ([DONE, LATE], ("error_rate=1",), None, 3),
        ([BAD, BAD], ("error_rate=1",), None, 3),
        ([DONE, LATE, LOST], ("ttft_max=1ms",), TRIPPED, 124),
        ([DONE, LOST], (), Breaker().step(Interrupted()), 130),
        ([DONE, LOST], GOOD, Breaker().step(Interrupted()), 130),
    ],
)
def test_exit_codes(outcomes, gates, breaker, code):
    """Interrupted, then tripped, then gates, then requests that did not complete."""
    found = report(outcomes, gates, breaker)
    assert found.exit_code == code
    assert found.passed == (code == 0)


def test_json_csv_and_table_tell_the_same():
    """All three hold every request or count; JSON is strict; CSV has a line per request in order."""
    found = report([DONE, LATE, BAD, LOST], ("ttft_p99=1s",), TRIPPED)
    value = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert value["counts"] == {
        "planned": 4, "sent": 3, "completed": 1, "timed_out": 1, "errors": 1, "cancelled": 1,
    }  # fmt: skip
    assert [each["outcome"] for each in value["requests"]] == [
        "completed", "timed_out", "error", "cancelled",
    ]  # fmt: skip
    assert [each["timed_out"] for each in value["requests"]] == [False, True, False, False]
    assert value["breaker"]["timeout"] == "connect"
    rows = found.to_csv().splitlines()
    assert rows[0].split(",") == list(COLUMNS)
    assert [row.split(",")[:2] for row in rows[1:]] == [
        [str(each["index"]), each["outcome"]] for each in value["requests"]
    ]
    text = "\n".join(lines(found))
    assert "1 timed out, 1 failed, 1 cancelled (1 of them never sent)" in text
    assert "1 x total: " in text
    assert "stopped by the first timeout: request 1, connect" in text
    assert "FAILED: 1 timed out, 1 cancelled, 1 failed of 4" in text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2s", 2), ("250ms", 0.25), ("1m30s", 90), ("5", 5), ("1.5h", 5400), ("20us", 2e-5),
     ("", None), ("s", None), ("-1s", None), ("1s1", None), ("nan", None), ("1e3s", None)],
)  # fmt: skip
def test_durations(text, seconds):
    """Numbers with units, or bare seconds; anything else is no duration."""
    assert parse_seconds(text) == pytest.approx(seconds)
