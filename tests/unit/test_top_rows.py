"""Rows of `top`: whatever answers, what is shown is plain text and finite numbers."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest

from stallwatch.top.rows import (
    MAX_WORDS,
    LaneRow,
    detail,
    engine_rows,
    lane_rows,
    number,
    process_rows,
    stall_rows,
    words,
)


def lane(
    address: str, age_s: float, limit_s: float, phase: str = "execute_model"
) -> dict[str, Any]:
    return {"address": address, "cls": "work", "phase": phase, "age_s": age_s, "limit_s": limit_s}


def test_the_lane_nearest_to_its_limit_comes_first() -> None:
    """Lanes are ordered by the part of their limit that is spent, lanes without a limit last."""
    found = lane_rows([lane("a", 900, 0), lane("b", 1, 60), lane("c", 50, 60), lane("d", 70, 60)])

    assert [row.address for row in found] == ["d", "c", "a", "b"]


def test_lanes_far_from_their_limits_keep_their_places() -> None:
    """Lanes that differ by less than a tenth of their limit stand by address, look after look."""
    first = lane_rows([lane("a", 1, 60), lane("b", 2, 60)])
    second = lane_rows([lane("a", 3, 60), lane("b", 1, 60)])

    assert [r.address for r in first] == [r.address for r in second] == ["a", "b"]


def test_lanes_stand_as_people_count() -> None:
    """Numbers in addresses are compared as numbers, however long and however they are written."""
    names = [
        "worker:10/a",
        "worker:2/b",
        "worker:2/a",
        "api:0/loop",
        "worker:007/a",
        "worker:1" * 900,
    ]
    found = [row.address for row in lane_rows([lane(name, 1, 60) for name in names])]

    assert found[0] == "api:0/loop"
    assert found[1].startswith("worker:1worker")
    assert found[2:] == ["worker:2/a", "worker:2/b", "worker:007/a", "worker:10/a"]


@pytest.mark.parametrize("bad", [None, True, "5", -1, float("nan"), float("inf"), 10**400, [], {}])
def test_what_is_no_number_is_zero(bad: object) -> None:
    """Only a finite number that is not negative is a number."""
    assert number(bad) == 0.0


def test_words_are_clean_and_bounded() -> None:
    """No control, no escape and no direction mark is left, and a megabyte is cut."""
    found = words("\x1b]0;owned\x07\x9b31m\u202eevil\n" + "x" * 1_000_000)

    assert found.isprintable()
    assert "evil" in found
    assert len(found) <= MAX_WORDS


def test_the_filter_takes_every_word_in_any_case() -> None:
    """A lane matches when each word of the filter is in its address, class or phase."""
    row = LaneRow("worker:3/model", "work", "execute_model", 1.0, 2.0, "")

    assert row.matches("WORKER:3 exec")
    assert row.matches("")
    assert not row.matches("worker:3 idle")


def test_details_and_wait_targets_are_notes() -> None:
    """What a lane waits for, its details and a torn record stand in its notes."""
    given = lane("w", 1, 2) | {"wait_on": "w:1/m", "details": {"step": 7}, "torn": True}

    assert lane_rows([given])[0].notes == "waits for w:1/m step=7 (torn)"


def _anything(rng: random.Random, depth: int) -> Any:
    """A random JSON value whose objects use the daemon's keys."""
    keys = ["items", "name", "state", "lanes", "processes", "details", "age_s", "limit_s", "command",
            "address", "phase", "culprit", "id", "detected_at", "budget", "wait_on"]  # fmt: skip
    simple = [None, True, 0, -1, 1e308, float("inf"), 10**30, "", "\x1b[2J", "chat"]
    kind = rng.randrange(3) if depth else 2
    if kind == 0:
        return {rng.choice(keys): _anything(rng, depth - 1) for _ in range(6)}
    if kind == 1:
        return [_anything(rng, depth - 1) for _ in range(3)]
    return rng.choice(simple)


def test_no_answer_can_break_the_rows() -> None:
    """Random JSON in place of an answer gives rows, of clean text and finite numbers."""
    rng = random.Random(7)
    for _ in range(1000):
        answer = _anything(rng, 4)
        rows = [*engine_rows(answer), *lane_rows(answer), *process_rows(answer), detail(answer)]
        values = list(_leaves([dataclasses.astuple(row) for row in [*rows, *stall_rows(answer)]]))

        assert all(value.isprintable() for value in values if isinstance(value, str))
        assert all(math.isfinite(value) for value in values if not isinstance(value, str))


def _leaves(value: Any) -> Iterator[str | float]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def test_a_described_engine_shows_only_what_is_known() -> None:
    """Absent and empty facts of an engine are no lines."""
    found = detail(
        json.loads('{"name": "chat", "state": "ready", "reason": "", "command": ["a", 1]}')
    )

    assert found.fields == (("State", "ready"), ("Command", "a 1"))
