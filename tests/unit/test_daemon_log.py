"""How loud each event is in the daemon's log."""

from __future__ import annotations

import io
import json

import pytest

from stallwatch.daemon.events import EventRing
from stallwatch.daemon.log import EventLog
from stallwatch.lifecycle.states import State
from stallwatch.testing.clock import FakeClock


@pytest.mark.parametrize(
    ("type_", "data", "level"),
    [
        # command not found, a port that stays held; before that, each try on it
        ("state", {"state": str(State.FAILED)}, "error"),
        ("state", {"state": str(State.BACKOFF)}, "warning"),
        ("state", {"state": str(State.READY)}, "info"),
        ("state", {}, "info"),
        ("foreign", {"port": 8001}, "warning"),  # somebody else answers there
        ("leftover", {}, "warning"),
        ("request-lost", {"count": 1}, "warning"),
        ("no-lanes", {}, "warning"),
        ("fault", {}, "error"),
        ("exit", {"state": str(State.FAILED)}, "warning"),
        ("started", {"pid": 1}, "info"),
    ],
)
def test_what_an_operator_must_see_is_no_mere_information(monkeypatch, type_, data, level):
    """An engine that does not start is a warning while it is tried again, then an error."""
    monkeypatch.setenv("STALLWATCH_LOG", "json")
    ring, stream = EventRing(FakeClock()), io.StringIO()
    log = EventLog(ring, stream)
    ring.emit("chat", type_, "some words", **data)
    log.start()
    log.stop(10.0)
    (line,) = stream.getvalue().splitlines()
    found = json.loads(line)
    assert (found["level"], found["event"], found["type"]) == (level, "some words", type_)
