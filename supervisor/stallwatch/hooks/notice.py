"""What is told, and when: events in, notices out. Pure."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from stallwatch.control.service import Event

SCHEMA = "stallwatch.notice/1"
_FAILURE = ("incarnation", "kind", "culprit", "phase", "elapsed_s", "limit_s", "action")


@dataclass(frozen=True, slots=True)
class Notice:
    """One thing to tell. `id` is the same in every attempt, so that a receiver can drop repeats."""

    id: str
    event: str  # stall, exhausted, unkillable, recovered
    engine: str
    at: str  # RFC 3339
    message: str
    failure: dict[str, Any]  # of the last stall told; empty when there was none

    def body(self) -> bytes:
        """The JSON that a command reads and a webhook gets."""
        whole = {
            "schema": SCHEMA, "id": self.id, "event": self.event, "engine": self.engine,
            "at": self.at, "message": self.message, "failure": self.failure or None,
        }  # fmt: skip
        return json.dumps(whole, separators=(",", ":")).encode()


class Selector:
    """Which events are told. Thread-safe: events of one engine come from several threads.

    `recovered` is the first READY after a trouble that was told: by itself or after a restart. An
    alert is no trouble of that kind, the engine served all the time.
    """

    def __init__(self, wanted: Collection[str], *, run: str) -> None:
        self._wanted = frozenset(wanted)
        self._run = run  # tells the ids of two daemons apart
        self._lock = threading.Lock()
        self._failures: dict[str, dict[str, Any]] = {}
        self._troubled: set[str] = set()

    def select(self, event: Event) -> Notice | None:
        """The notice for an event, None for most."""
        with self._lock:
            name = self._name(event)
            failure = dict(self._failures.get(event.engine, {}))
        if not name or name not in self._wanted:
            return None
        return Notice(
            id=f"{self._run}-{event.id}",
            event=name,
            engine=event.engine,
            at=event.at,
            message=event.message,
            failure=failure,
        )

    def _name(self, event: Event) -> str:
        state = event.data.get("state", "")
        if event.type == "stall":
            data = event.data
            self._failures[event.engine] = {
                "id": data.get("stall", ""),
                **{key: data[key] for key in _FAILURE if key in data},
            }
            if data.get("action") != "alert":
                self._troubled.add(event.engine)
            return "stall"
        # "unkillable" is said twice: by who killed, and with the state that follows from it
        if event.type in ("exhausted", "unkillable") and state:
            self._troubled.add(event.engine)
            return event.type
        if state == "ready" and event.engine in self._troubled:
            self._troubled.discard(event.engine)
            return "recovered"
        return ""
