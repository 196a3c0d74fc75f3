"""What `status` tells an operator to do next, and where clients are to be sent."""

from __future__ import annotations

from typing import Any

import pytest

from stallwatch.cli.status import _doors, _hint, _waiting

STALL = "st-20261130T031502Z-9f2c41aa"


def engine(state: str, **more: Any) -> dict[str, Any]:
    return {"name": "chat", "state": state, "last_stall": "", "up": False, **more}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (engine("failed"), ("stallwatch logs chat", "stallwatch restart chat")),
        (engine("failed", last_stall=STALL), ("show 9f2c41aa", "stallwatch restart chat")),
        (engine("failed", up=True), ("stallwatch events chat",)),
        (engine("exhausted", last_stall=STALL), ("show 9f2c41aa", "stallwatch restart chat")),
        (engine("unkillable"), ("describe chat", "stallwatch restart chat")),
    ],
)
def test_an_engine_that_stays_down_has_a_next_step(found, words):
    """The cause first, then the command that starts it again."""
    said = _hint([found], [{"id": STALL}])
    for word in words:
        assert word in said


RETURNING = {"comes_back": True, "restarts_in_window": 1, "budget": 5}


@pytest.mark.parametrize("up", [True, False])
def test_an_engine_that_comes_back_asks_nobody_for_help(up):
    """FAILED on its way to a restart: that it restarts by itself, and no 'mend it'."""
    said = _hint([engine("failed", up=up, last_stall=STALL, **RETURNING)], [{"id": STALL}])
    assert "started again by itself" in said
    assert "mend" not in said
    assert "show 9f2c41aa" in said


def test_a_back_off_says_when_it_restarts_and_how_to_do_it_now():
    """The time, the command that does not wait, and where the cause is."""
    waits = engine("backoff", backoff_s=12.4, reason="port 8001 is held", **RETURNING)
    said = _hint([waits], [])
    assert "chat is started again by itself in 12s" in said
    assert "stallwatch restart chat" in said
    assert "mend" not in said
    assert _waiting([waits]) == ["chat restarts in 12s: port 8001 is held"]


def test_what_a_starting_engine_waits_for_is_said():
    """Somebody else's answer on its port is no secret of `describe`."""
    found = [engine("starting", reason="READY waits for port 8001"), engine("ready", reason="x")]
    assert _waiting(found) == ["chat is starting: READY waits for port 8001"]


def test_a_healthy_engine_needs_none():
    """The last report, or where to look."""
    assert "show 9f2c41aa" in _hint([engine("ready")], [{"id": STALL}])
    assert "describe" in _hint([engine("ready")], [])


def test_where_clients_connect_is_said_once_for_each_address():
    """Engines behind one gateway share a line; the gateway itself and an older daemon have none."""
    front = "http://127.0.0.1:8000"
    engines = [
        {"name": "a", "clients": front, "role": "engine"},
        {"name": "b", "clients": front, "role": "engine"},
        {"name": "c", "clients": "http://127.0.0.1:8003", "role": "engine"},
        {"name": "d"},
        {"name": "gateway", "clients": front, "role": "gateway"},
    ]
    assert _doors(engines) == [
        f"clients of a, b connect to {front}",
        "clients of c connect to http://127.0.0.1:8003",
    ]
