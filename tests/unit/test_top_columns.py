"""Widths of columns where a terminal is narrow."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stallwatch.top.columns import GAP, LANES, fit

WANTS = {"LANE": 16, "CLASS": 5, "PHASE": 16, "AGE": 6, "LIMIT": 6, "USED": 4, "DETAILS": 7}


def test_everything_has_its_place_where_there_is_room() -> None:
    """Nothing gives way as long as all of it fits."""
    assert fit(WANTS, LANES, 72) == WANTS


def test_age_and_limit_are_whole_in_forty_columns() -> None:
    """What one looks for stays; the others are narrower, or are not there."""
    assert fit(WANTS, LANES, 40) == {"LANE": 12, "PHASE": 10, "AGE": 6, "LIMIT": 6}


def test_a_long_address_is_cut_before_a_column_goes() -> None:
    """One lane with a long name does not cost the others their details."""
    found = fit({**WANTS, "LANE": 90}, LANES, 80)

    assert list(found) == list(WANTS)
    assert found["LANE"] == 80 - sum(WANTS.values()) + WANTS["LANE"] - GAP * 6


@given(st.fixed_dictionaries({name: st.integers(1, 300) for name in WANTS}), st.integers(0, 400))
def test_age_and_limit_give_nothing(wants: dict[str, int], width: int) -> None:
    """Whatever else is there: they keep their width, and the rest fits beside them if it can at all."""
    found = fit(wants, LANES, width)
    taken = sum(found.values()) + GAP * (len(found) - 1)

    assert (found["AGE"], found["LIMIT"]) == (wants["AGE"], wants["LIMIT"])
    assert all(1 <= found[name] <= wants[name] for name in found)
    assert taken <= max(width, sum(found[n] for n in ("AGE", "LIMIT")) + found["LANE"] + 2 * GAP)
    assert found["LANE"] <= 4 or taken <= width
