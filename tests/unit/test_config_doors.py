"""Where clients connect, for every shape of a configuration."""

from __future__ import annotations

import pytest

from stallwatch.config import doors
from stallwatch.config.load import build

CHAT = {"command": ["x"], "port": 8001}
CODE = {"command": ["y"], "port": 8002}


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"engines": {"chat": CHAT}}, "clients connect to http://127.0.0.1:8001 (chat)"),
        (
            {"engines": {"chat": CHAT, "code": CODE}},
            "clients connect to http://127.0.0.1:8001 (chat), http://127.0.0.1:8002 (code)",
        ),
        (
            {"engines": {"chat": CHAT, "code": CODE}, "gateway": {"listen": "0.0.0.0:8000"}},
            "clients connect to http://0.0.0.0:8000 (chat, code)",
        ),
        (
            {"engines": {"chat": CHAT, "code": CODE}, "gateway": {"engines": ["code"]}},
            "clients connect to http://127.0.0.1:8001 (chat), http://127.0.0.1:8000 (code)",
        ),
        (
            {"engines": {"chat": CHAT}, "gateway": {"listen": "unix:/run/front.sock"}},
            "clients connect to unix:/run/front.sock (chat)",
        ),
        ({"engines": {"chat": {"command": ["x"]}}}, ""),
    ],
)
def test_words(tables: dict[str, object], words: str) -> None:
    """The gateway's address before an engine's own; nothing where nobody knows."""
    assert doors.words(build(tables, source="")) == words


def test_the_gateways_own_door() -> None:
    """It is supervised like an engine and has an address too."""
    config = build({"engines": {"chat": CHAT}, "gateway": {}}, source="")
    assert doors.door(config, "gateway") == "http://127.0.0.1:8000"
