"""Arrivals and plans: pure, repeatable by seed, refused by name when they cannot be meant."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallwatch_engine.bench.arrivals import constant, immediate, poisson, self_timed
from stallwatch_engine.bench.errors import PlanRefused
from stallwatch_engine.bench.plan import Plan
from stallwatch_engine.bench.prompt import MAX_TOKENS, Message, Prompt

RATES = st.floats(0.01, 1e5)


@given(count=st.integers(1, 200), rate=RATES, seed=st.integers(0, 2**63))
def test_every_mode_starts_at_zero_and_never_goes_back(count, rate, seed):
    """Any mode gives `count` finite times from 0 on, in order: a plan takes each of them."""
    for times in (immediate(count), constant(count, rate), poisson(count, rate, seed)):
        assert len(times) == count
        assert times[0] == 0
        assert all(a <= b < math.inf for a, b in itertools.pairwise(times))
        Plan((Prompt("x", 1),) * count, times, 1)


@given(rate=RATES, seed=st.integers(0, 1000))
def test_equal_seeds_give_equal_arrivals(rate, seed):
    """A run can be repeated; another seed gives other times."""
    assert poisson(20, rate, seed) == poisson(20, rate, seed)
    assert poisson(20, rate, seed) != poisson(20, rate, seed + 1)


def test_poisson_gaps_have_the_asked_mean_and_spread():
    """Over many gaps the mean is 1/rate and so is the standard deviation, as exponential gaps have it."""
    times = poisson(20_000, 50.0, seed=7)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean == pytest.approx(1 / 50, rel=0.05)
    assert spread == pytest.approx(mean, rel=0.05)


@given(
    gaps=st.lists(st.floats(0, 1e4), min_size=1, max_size=50),
    start=st.floats(0, 1e6),
    scale=st.floats(0.01, 100),
)
def test_a_trace_keeps_its_gaps(gaps, start, scale):
    """The first request goes at once and the others as long after it as in the trace, times the scale."""
    times = list(itertools.accumulate(gaps, initial=start))
    found = self_timed(times, scale)
    assert found[0] == 0
    assert [at / scale for at in found] == pytest.approx([at - start for at in times], abs=1e-6)
    Plan((Prompt("x", 1),) * len(found), found, 1)


@pytest.mark.parametrize("times", [[0, None], [0, math.nan], [-1.0], [2.0, 1.0], [math.inf]])
def test_a_trace_with_a_wrong_time_is_refused_by_request(times):
    """No time, no number, negative or going back: the request is named."""
    with pytest.raises(PlanRefused, match=f"request {len(times) - 1} of the trace"):
        self_timed(times)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_a_rate_that_is_none_is_refused(rate):
    """Zero, negative, NaN and infinite rates are errors in both modes."""
    with pytest.raises(PlanRefused, match="request rate"):
        constant(3, rate)
    with pytest.raises(PlanRefused, match="request rate"):
        poisson(3, rate, 0)


@pytest.mark.parametrize(
    ("prompts", "arrivals", "concurrency"),
    [(0, (), 1), (2, (0.0,), 1), (2, (1.0, 0.0), 1), (1, (math.nan,), 1), (1, (0.0,), 0)],
)
def test_a_plan_that_cannot_be_carried_out_is_refused(prompts, arrivals, concurrency):
    """No requests, too few times, times that go back or are none, no place at all."""
    with pytest.raises(PlanRefused):
        Plan((Prompt("x", 1),) * prompts, arrivals, concurrency)


def test_what_a_prompt_asks_in_each_interface():
    """Texts and turns go both ways; token ids go into completions only."""
    turns = Prompt((Message("system", "be brief"), Message("user", "why?")), 5)
    assert turns.completion() == {"prompt": "be brief\nwhy?", "max_tokens": 5}
    assert [turn["role"] for turn in turns.chat()["messages"]] == ["system", "user"]
    assert Prompt("hi", 5).chat()["messages"] == [{"role": "user", "content": "hi"}]
    assert Prompt((3, 4), 5).completion()["prompt"] == [3, 4]
    with pytest.raises(PlanRefused, match="token ids"):
        Prompt((3, 4), 5).chat()


@pytest.mark.parametrize(("content", "most"), [("", 1), ((), 1), ("x", 0), ("x", MAX_TOKENS + 1)])
def test_an_empty_prompt_or_answer_is_refused(content, most):
    """Nothing to ask, or no room for an answer."""
    with pytest.raises(PlanRefused):
        Prompt(content, most)
