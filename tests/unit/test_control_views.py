"""JSON of views and frames of events."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallwatch.control.service import Event
from stallwatch.control.stream import frame
from stallwatch.control.views import dumps, engine_json, plain
from stallwatch.lifecycle.states import State
from stallwatch.testing.service import engine_view


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_no_nan_reaches_json(bad):
    """A number that JSON cannot say is null."""
    assert json.loads(dumps({"a": [bad, 1.5]})) == {"a": [None, 1.5]}


def test_plain_enums_and_odd_things():
    """Enums are their word and anything unknown is its text."""
    assert plain({State.READY: State.READY, "o": b"x"}) == {"ready": "ready", "o": "b'x'"}


def test_only_the_single_view_has_lanes():
    """The list is short; one engine is whole, with details by name."""
    assert "lanes" not in engine_json(engine_view(), deep=False)
    deep = engine_json(engine_view(), deep=True)
    assert deep["lanes"][0]["details"] == {"step": 118, "requests": 3}


@given(st.text(), st.text())
def test_a_frame_is_three_lines(kind, message):
    """No event text can begin a field or a frame of its own."""
    lines = frame(Event(7, "t", "e", kind, message)).decode().split("\n")

    assert lines[0] == "id: 7"
    assert lines[1].startswith("event: ")
    assert json.loads(lines[2].removeprefix("data: "))["message"] == message
    assert lines[3:] == ["", ""]
