"""Limits that are learnt, and rates that decay."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallwatch.board.image import BoardImage, LaneClass
from stallwatch.testing.snapshots import frame, lane, ns
from stallwatch.watch.learned import AGE, CAP_NS, ENOUGH, FLOOR_NS, Durations, Learner
from stallwatch.watch.limits import with_learned
from stallwatch.watch.pace import IN_A_ROW, Pace, decayed, keep_pace
from stallwatch.watch.policy import Policy, S


def durations(*took_s: float, times: int = ENOUGH) -> Durations:
    found = Durations()
    for took in took_s:
        for _ in range(times):
            found.add(ns(took))
    return found


@pytest.mark.parametrize(
    ("took", "limit"),
    [
        ((0.02,), FLOOR_NS),
        ((10.0,), 50 * S),
        ((200.0,), CAP_NS),
    ],
)
def test_a_learnt_limit_is_five_times_the_longest_within_floor_and_cap(took, limit):
    """clamp(max(3 x p99.9, 5 x longest), floor, cap)."""
    assert durations(*took).limit_ns() == limit


def test_one_slow_phase_is_forgotten_two_ages_later():
    """The longest is that of this age and the last: a limit that rose comes down again."""
    found = durations(0.02)
    found.add(ns(20.0))
    assert found.limit_ns() == 100 * S
    for _ in range(3 * AGE):
        found.add(ns(0.02))
    assert found.limit_ns() == FLOOR_NS


def test_short_prompts_do_not_lower_what_a_long_one_needs():
    """A phase with a default of its own keeps it as the floor of what is learnt."""
    policy = with_learned(Policy(), {"prefill": FLOOR_NS, "execute_model": FLOOR_NS})
    assert policy.limit(frame("prefill")) == Policy().limit(frame("prefill")) > FLOOR_NS
    assert policy.limit(frame("execute_model")) == FLOOR_NS


def test_little_is_not_enough():
    """Fewer samples than a thousand teach nothing."""
    assert durations(1.0, times=ENOUGH - 1).limit_ns() is None


@given(st.lists(st.integers(0, 1 << 60), max_size=20))
def test_a_learnt_limit_is_never_under_the_floor_nor_over_the_cap(took):
    """Whatever durations come, and however absurd."""
    found = durations(0.01)
    for one in took:
        found.add(one)
    limit = found.limit_ns()
    assert limit is not None
    assert FLOOR_NS <= limit <= CAP_NS


def board(*, at: float, now: float, name: str = "execute_model", cls=LaneClass.WORK) -> BoardImage:
    return BoardImage(1, ns(now), lanes=(lane("model", frame(name, cls, at=at)),))


def test_only_ended_work_and_waits_are_learnt():
    """A phase counts once it ended; idle time, starts and the phase under way do not."""
    for cls, counted in ((LaneClass.WORK, 1), (LaneClass.WAIT, 1), (LaneClass.IDLE, 0),
                         (LaneClass.START, 0)):  # fmt: skip
        learner = Learner()
        learner.look(board(at=0, now=1, cls=cls), ns(1))
        assert learner.to_dict() == {}
        learner.look(board(at=4, now=5, cls=cls), ns(5))
        assert len(learner.to_dict()) == counted
        learner.look(board(at=4, now=6, cls=cls), ns(6))
        kept = learner.to_dict().get("execute_model", {"counts": []})
        assert sum(kept["counts"]) == counted


def test_what_was_learnt_survives_as_json():
    """to_dict and restore are each other's inverse, through a file."""
    learner, again = Learner(), Learner()
    for n in range(ENOUGH + 2):
        learner.look(board(at=2 * n, now=2 * n + 1), ns(2 * n + 1))
    again.restore(json.loads(json.dumps(learner.to_dict())))
    assert again.to_dict() == learner.to_dict()
    assert again.limits() == learner.limits() == {"execute_model": FLOOR_NS}


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
    )
)
def test_a_damaged_file_teaches_nothing(saved):
    """Whatever JSON lies there, restore takes no part of it that is not its own."""
    learner = Learner()
    learner.restore(saved)
    assert learner.limits() == {}


def test_made_up_names_are_bounded():
    """A worker that makes phase names up cannot grow the table."""
    learner = Learner()
    for n in range(1000):
        learner.look(board(at=2 * n, now=2 * n + 1, name=f"phase-{n}"), ns(2 * n + 1))
    assert len(learner.to_dict()) <= 128


# -- the rate of work ------------------------------------------------------------------------------

POLICY = replace(Policy(), degraded_ns=S)


def pace(*rates: int, turns: tuple[int, ...] = ()) -> Pace:
    """The memory after one window of each rate; the loop turns three times for each piece of work."""
    found, work, beats = keep_pace(Pace(), {1: (7, 0, 0)}, S, POLICY, busy=True), 0, 0
    for n, rate in enumerate(rates):
        work += rate
        beats += turns[n] if turns else 3 * rate
        found = keep_pace(found, {1: (7, work, beats)}, (n + 2) * S, POLICY, busy=True)
    return found


def test_fewer_tokens_from_a_loop_that_turns_as_before_are_no_decay():
    """Most clients have left: a twentieth of the tokens, as many steps as ever."""
    rates = (200,) * 6 + (10,) * 5
    assert 1 in pace(*rates).slow
    assert not pace(*rates, turns=(100,) * 11).slow


@pytest.mark.parametrize(
    ("rates", "told"),
    [
        ((50,) * 6 + (2,) * IN_A_ROW, True),
        ((50,) * 6 + (2,) * (IN_A_ROW - 1), False),
        ((50,) * 6 + (2, 50, 2, 2), False),
        ((50,) * 6 + (6,) * IN_A_ROW, False),
        ((50,) * 6 + (0,) * IN_A_ROW, False),
        ((50,) * 3 + (2,) * IN_A_ROW, False),
        ((5,) * 6 + (1,) * 9, False),
    ],
    ids=["decay", "two", "broken", "half", "nothing", "no-baseline", "too-rare"],
)
def test_a_decay_is_a_tenth_of_the_usual_three_times_in_a_row(rates, told):
    """One slow window is a long prompt, and no work at all is another rule's."""
    slow = pace(*rates).slow.get(1)
    assert (slow is not None and decayed(slow)) is told


def test_idle_windows_have_no_rate():
    """Nothing is pending: no window is counted, and a slow stretch is over."""
    found = pace(*(50,) * 6, *(2,) * 3)
    after = keep_pace(found, {1: (7, 999, 9999)}, 60 * S, POLICY, busy=False)
    assert not after.slow
    assert after.history == found.history
