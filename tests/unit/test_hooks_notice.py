from __future__ import annotations

import hashlib
import hmac
import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from stallwatch.config.hooks import HooksConfig, Told
from stallwatch.control.service import Event
from stallwatch.hooks.notice import Selector
from stallwatch.hooks.signing import sign

ALL = get_args(Told)


class Feed:
    """Events of a daemon, one after the other."""

    def __init__(self, wanted: tuple[str, ...] = ALL) -> None:
        self.selector = Selector(wanted, run="r")
        self.count = 0

    def __call__(self, type_: str, engine: str = "chat", **data: Any) -> str:
        self.count += 1
        event = Event(id=self.count, at="t", engine=engine, type=type_, message="m", data=data)
        self.last = self.selector.select(event)
        return self.last.event if self.last else ""

    def stall(self, action: str = "restart") -> str:
        return self("stall", stall="s1", kind="DEVICE_WAIT", action=action, secret="x")


def test_a_stall_and_the_ready_after_it_are_told_once():
    """stall, then nothing on the way, then recovered at READY, and no second one."""
    feed = Feed()
    said = [feed("state", state=s) for s in ("starting", "ready", "suspect", "ready")]
    assert not any(said)
    assert feed.stall() == "stall"
    assert not any(feed("state", state=s) for s in ("stalled", "failed", "starting"))
    assert not feed("state", engine="other", state="ready")
    assert feed("state", state="ready") == "recovered"
    assert feed.last is not None
    assert feed.last.failure["id"] == "s1"
    assert not feed("state", state="ready")


def test_an_alert_is_told_and_nothing_recovers_from_it():
    """The engine served all the time."""
    feed = Feed()
    assert feed.stall("alert") == "stall"
    assert not feed("state", state="ready")


@pytest.mark.parametrize("what", ["exhausted", "unkillable"])
def test_the_end_of_an_engine_is_told_with_its_state_only(what):
    """The killer's own words come first and are not a second notice; an operator's restart recovers."""
    feed = Feed()
    assert not feed(what)
    assert feed(what, state=what) == what
    assert feed("state", state="ready") == "recovered"


def test_only_what_is_wanted_is_told():
    """`events` chooses; what is not chosen still counts for `recovered`."""
    feed = Feed(("recovered",))
    assert not feed.stall()
    assert feed("state", state="ready") == "recovered"


def test_a_body_is_json_with_the_failure_and_no_other_data():
    """Keys of the contract; data of an event that is not part of a FAILURE stays inside."""
    feed = Feed()
    feed.stall()
    assert feed.last is not None
    body = json.loads(feed.last.body())
    assert list(body) == ["schema", "id", "event", "engine", "at", "message", "failure"]
    assert body["failure"] == {"id": "s1", "kind": "DEVICE_WAIT", "action": "restart"}


def test_a_signature_covers_time_and_body():
    """It is HMAC-SHA256 of 'TIMESTAMP.BODY'; another time, body or key gives another one."""
    expected = hmac.new(b"key", b"17.{}", hashlib.sha256).hexdigest()
    assert sign(b"key", 17, b"{}") == f"v1={expected}"
    others = {sign(b"key", 18, b"{}"), sign(b"key", 17, b"{ }"), sign(b"kez", 17, b"{}")}
    assert len(others) == 3
    assert f"v1={expected}" not in others


def test_the_receivers_example_in_the_docs_accepts_ours_and_nothing_else():
    """docs/hooks.md verifies what sign() makes; old, altered, malformed: refused, no exception."""
    text = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    verify, key, body = names["verify"], b"key", b'{"a":1}'
    good = sign(key, 1000, body)
    assert verify(key, "1000", good, body, now=1299.0)
    assert not verify(key, "1000", good, body, now=1301.0)
    assert not verify(key, "1000", good, body, now=699.0)
    assert not verify(key, "1001", good, body, now=1001.0)
    assert not verify(key, "1000", good, body + b" ", now=1000.0)
    assert not verify(b"kez", "1000", good, body, now=1000.0)
    for stamp, signature in (
        ("", good),
        ("1e3", good),
        ("²", good),
        ("1000", ""),
        ("1000", "v1=é"),
    ):
        assert not verify(key, stamp, signature, body, now=1000.0)


def test_the_keys_in_the_docs_are_the_keys_of_the_model():
    """docs/hooks.md names every key of [hooks], and the notice there has the keys of a body."""
    text = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text()
    rows = text.partition("| key |")[2].partition("\n\n")[0]
    assert set(HooksConfig.model_fields) == set(
        re.findall(r"`(\w+)`", "".join(row.split("|")[1] for row in rows.splitlines()[2:]))
    )
    (shown,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    feed = Feed()
    feed("stall", stall="s", **{key: 1 for key in json.loads(shown)["failure"] if key != "id"})
    assert feed.last is not None
    body = json.loads(feed.last.body())
    assert list(json.loads(shown)) == list(body)
    assert set(json.loads(shown)["failure"]) == set(body["failure"])
