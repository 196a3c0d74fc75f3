"""Configured limits become a policy, or are refused by name."""

from __future__ import annotations

import math

import pytest

from stallwatch.errors import ConfigError
from stallwatch.testing.snapshots import frame, ns
from stallwatch.watch.limits import build, with_learned
from stallwatch.watch.policy import Policy


def test_known_keys_set_fields_and_others_are_phases():
    """default, start, start_silence and no_progress are the policy's own; the rest name phases."""
    policy = build(
        {"default": 5, "start": 60, "start_silence": 7.5, "no_progress": 9, "step": 0.25}
    )
    assert (policy.default_ns, policy.start_ns) == (ns(5), ns(60))
    assert (policy.start_silence_ns, policy.no_progress_ns) == (ns(7.5), ns(9))
    assert policy.phases == {"step": ns(0.25)}


def test_nothing_configured_is_the_default_policy():
    """An empty table changes nothing."""
    assert build({}) == Policy()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0, -1.0, 1e30, True])
def test_limits_that_never_or_always_fire_are_refused(bad):
    """Trap 14: NaN and infinity would switch the net off silently."""
    with pytest.raises(ConfigError, match="execute_model") as caught:
        build({"execute_model": bad}, where="[engines.chat.limits]")
    assert "[engines.chat.limits]" in str(caught.value)
    assert caught.value.exit_code == 78


def test_learned_limits_rank_below_configured_ones():
    """What an operator wrote is never overruled by statistics."""
    policy = with_learned(build({"a": 5}), {"a": ns(1), "b": ns(2)})
    assert policy.limit(frame("a")) == ns(5)
    assert policy.limit(frame("b")) == ns(2)
    assert policy.limit(frame("c")) == ns(60)
