"""What `status` tells an operator to do next, and where clients are to be sent."""

from __future__ import annotations

from typing import Any

import pytest

from stallwatch.cli.status import _doors, _hint

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
