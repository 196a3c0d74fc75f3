from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallwatch.lifecycle.budget import Budget, Pace, S


def test_back_off_grows_to_the_cap_and_jitter_only_lengthens():
    """Delays follow 1, 5, 15, 60, 120 s, at most 20 % longer, never over 300 s."""
    budget, now, seen = Budget(Pace(limit=99), seed=7), 0, []
    for _ in range(8):
        seen.append(budget.delay_ns(now) / S)
        budget = budget.restarted(now)
        now += S

    for delay, base in zip(seen, (1, 5, 15, 60, 120, 300, 300, 300), strict=True):
        assert base <= delay <= min(base * 1.2, 300)


def test_two_daemons_do_not_restart_in_step():
    """Different seeds give different delays: engines that died together do not start together."""
    assert Budget(seed=1).delay_ns(0) != Budget(seed=2).delay_ns(0)


def test_three_fruitless_restarts_are_enough():
    """Three restarts in a row without READY or a served request spend the budget."""
    budget = Budget()
    for n in range(3):
        assert budget.refusal(n) == ""
        budget = budget.restarted(n)

    assert "3 restarts in a row" in budget.refusal(4)
    assert budget.progressed().refusal(4) == ""


def test_the_window_slides():
    """A restart older than the window no longer counts."""
    budget = Budget()
    for n in range(5):
        budget = budget.restarted(n * S).progressed()

    assert "5 restarts within 30 min" in budget.refusal(1799 * S)
    assert budget.refusal(1800 * S) == ""


def test_it_survives_a_daemon_restart_and_a_reboot():
    """Saved and restored, the budget refuses as before: by monotonic time, after a reboot by wall."""
    budget = Budget()
    for n in range(5):
        budget = budget.restarted(n * S).progressed()
    budget = budget.held_until(200 * S)
    saved = json.loads(json.dumps(budget.to_dict(now_ns=100 * S, wall=5000.0, boot_id="a")))

    same = Budget().restored(saved, now_ns=150 * S, wall=1.0, boot_id="a")
    reboot = Budget().restored(saved, now_ns=3 * S, wall=5050.0, boot_id="b")

    assert same == budget
    assert reboot.in_window(3 * S) == 5
    assert reboot.not_before_ns == 53 * S
    assert reboot.in_window(1800 * S) == 0


def test_a_clock_set_back_does_not_freeze_the_budget():
    """Wall time in the saved past's future places stamps at now, so that they still expire."""
    saved = Budget().restarted(0).to_dict(now_ns=0, wall=9e9, boot_id="a")

    budget = Budget().restored(saved, now_ns=5 * S, wall=1e9, boot_id="b")

    assert max(budget.stamps) <= 5 * S


@given(
    st.dictionaries(
        st.sampled_from(["boot_id", "stamps", "wall", "fruitless", "total", "not_before", "spent"]),
        st.recursive(
            st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3),
            lambda inner: st.lists(inner, max_size=4),
            max_leaves=6,
        ),
    )
)
def test_nonsense_in_the_state_file_never_raises(saved):
    """Whatever a damaged file holds, the budget loads and answers."""
    budget = Budget().restored(saved, now_ns=10 * S, wall=100.0, boot_id="x")

    assert isinstance(budget.refusal(10 * S), str)
    assert 0 <= budget.delay_ns(10 * S) <= 300 * S
    assert budget.not_before_ns <= 310 * S


@pytest.mark.parametrize("change", [Budget.progressed, Budget.reset])
def test_forgiving_nothing_changes_nothing(change):
    """A fresh budget forgiven is the same budget: no needless write of the state file."""
    assert change(Budget()) == Budget()
