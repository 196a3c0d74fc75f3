"""The daemon's own log on stderr: one line an event; JSON when stderr is no terminal.

It is written by a thread of its own that follows the event ring. A stderr that nobody reads
blocks that thread and nothing else; what the ring drops meanwhile is counted in the next line.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import Any, TextIO

import structlog

from stallwatch.control.service import Event
from stallwatch.daemon.events import EventRing

_LEVELS = {
    "stall": "error",
    "failure": "error",
    "exhausted": "error",
    "unkillable": "error",
    "fault": "error",
    "exit": "warning",
    "warn": "warning",
    "withdrawn": "warning",
    "restart": "warning",
    "foreign": "warning",
    "leftover": "warning",
    "config": "warning",
    "no-lanes": "warning",
    "request-lost": "warning",
}
# A change of state that says why an engine does not run: a held port, no such command.
_STATES = {"failed": "error", "backoff": "warning"}


def _level(event: Event) -> int:
    """The number that `logging` has for how loud it is."""
    word = _LEVELS.get(event.type, "info")
    if event.type == "state":
        word = _STATES.get(str(event.data.get("state", "")), word)
    return logging.getLevelNamesMapping()[word.upper()]


def _renderer(stream: TextIO) -> Any:
    choice = os.environ.get("STALLWATCH_LOG", "")
    if choice == "json" or (choice != "console" and not stream.isatty()):
        return structlog.processors.JSONRenderer()
    return structlog.dev.ConsoleRenderer(colors=stream.isatty() and "NO_COLOR" not in os.environ)


class EventLog:
    """Follows a ring and writes each event as one line until stopped."""

    def __init__(self, ring: EventRing, stream: TextIO | None = None) -> None:
        self._ring = ring
        self._stream = stream or sys.stderr
        self._stop = threading.Event()
        self._last = ring.begin
        self._logger = structlog.wrap_logger(
            structlog.PrintLogger(self._stream),
            processors=[
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                _renderer(self._stream),
            ],
            wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        )
        self._thread = threading.Thread(target=self._run, name="stallwatch-log", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 1.0) -> None:
        """Write what is left, for at most `timeout_s`: a full stderr may not hold the exit up."""
        self._stop.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            stopping = self._stop.is_set()
            for event in self._ring.wait(self._last, 0.0 if stopping else 0.5):
                lost = event.id - self._last - 1
                self._last = event.id
                self._write(event, lost)
            if stopping:
                return

    def _write(self, event: Event, lost: int) -> None:
        # The engine's own words go first: none of them may replace one of ours.
        fields: dict[str, Any] = {**event.data, "type": event.type, "event_id": event.id}
        fields.pop("event", None)
        if event.engine:
            fields["engine"] = event.engine
        if lost:
            fields["lost_before"] = lost
        try:
            self._logger.log(_level(event), event.message, **fields)
            self._stream.flush()
        except (OSError, ValueError):
            pass  # stderr is gone; the ring, the ledger and HTTP still have everything
