"""A daemon's events as they come, from which a soak learns when an engine failed and serves again."""

from __future__ import annotations

import collections
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from daemon_helpers import Daemon

POLL_S = 0.1
# The event that begins a stretch of an engine's life, and what that stretch is called.
_STRETCHES = {
    "chaos": "until it is found",
    "stall": "evidence",
    "state failed": "kill",
    "gone": "back-off",
    "started": "start",
    "state ready": "serving",
}


class Watch:
    """All events in order; waiting for one of them. Every wait has its deadline."""

    def __init__(self, run: Daemon) -> None:
        self.last = 0
        self._run = run
        self._events: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
        self._news = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def _follow(self) -> None:
        while not self._stop.wait(POLL_S):
            page = self._run.json(f"/v1/events?follow=false&after={self.last}")
            items = page.get("items", ())
            if items:
                with self._news:
                    for each in items:
                        self._events[str(each["engine"])].append(each)
                    self.last = int(page["last"])
                    self._news.notify_all()

    def _wait(self, find: Callable[[], Any], what: str, seconds: float) -> Any:
        until = time.monotonic() + seconds
        with self._news:
            while not (found := find()):
                left = until - time.monotonic()
                if left <= 0 or not self._news.wait(left):
                    if found := find():
                        return found
                    raise AssertionError(
                        f"not within {seconds:g} s: {what}\n{self._run.log()[-3000:]}"
                    )
            return found

    def _since(self, engine: str, last: int, word: str) -> dict[str, Any] | None:
        for each in reversed(self._events[engine]):
            if each["id"] <= last:
                return None
            if _word(each) == word:
                return each
        return None

    # -- waiting -------------------------------------------------------------------------------

    def serving(self, engine: str, seconds: float, *, after: int = 0) -> int:
        """Its incarnation, once it is READY and later than `after`.

        Asked of the daemon itself: a stall that only alerts is told as others are, and changes nothing.
        """
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            view = self._run.engine(engine)
            if view.get("state") == "ready" and int(view["incarnation"]) > after:
                return int(view["incarnation"])
            time.sleep(2 * POLL_S)  # a poll with a deadline
        raise AssertionError(f"not within {seconds:g} s: {engine} serves again: {view}")

    def stall(self, engine: str, since: int, seconds: float) -> str:
        """The id of its next stall after the event `since`; '' when none came."""
        try:
            found = self._wait(lambda: self._since(engine, since, "stall"), "a stall", seconds)
        except AssertionError:
            return ""
        return str(found["data"]["stall"])

    def gone(self, engine: str, since: int, seconds: float) -> None:
        """Its tree has ended."""
        self._wait(lambda: self._since(engine, since, "gone"), f"{engine}'s end", seconds)

    # -- afterwards ----------------------------------------------------------------------------

    def stalls(self) -> set[str]:
        """The ids of all stalls that were told."""
        with self._news:
            found = [e for events in self._events.values() for e in events if e["type"] == "stall"]
        return {str(each["data"]["stall"]) for each in found}

    def shares(self) -> dict[str, float]:
        """How the time of the engines was spent, from their first fault to their last READY."""
        spent: collections.Counter[str] = collections.Counter()
        for events in self._events.values():
            words = [(_word(e), datetime.fromisoformat(e["at"])) for e in events]
            words = [each for each in words if each[0] in _STRETCHES]
            first = next((n for n, each in enumerate(words) if each[0] == "chaos"), len(words))
            for (word, begin), (_, end) in zip(words[first:], words[first + 1 :], strict=False):
                spent[_STRETCHES[word]] += (end - begin).total_seconds()
        whole = sum(spent.values()) or 1.0
        return {what: round(seconds / whole, 3) for what, seconds in spent.most_common()}


def _word(event: dict[str, Any]) -> str:
    """Its type, and with a change of state the new one."""
    kind = str(event["type"])
    return f"state {event['data']['state']}" if kind == "state" else kind


class _Local(http.client.HTTPConnection):
    """HTTP over the control socket, which alone may give orders."""

    def __init__(self, path: Path, seconds: float) -> None:
        super().__init__("localhost", timeout=seconds)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def order(path: Path, target: str, body: dict[str, Any], seconds: float = 30.0) -> dict[str, Any]:
    """The daemon's answer to an order; what it refuses is {}."""
    connection = _Local(path, seconds)
    try:
        connection.request("POST", target, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        said = json.loads(response.read() or b"{}")
        return dict(said) if response.status == 200 else {}
    finally:
        connection.close()
