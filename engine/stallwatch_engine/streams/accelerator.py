"""Streams on an accelerator: torch's generic ones, with the two things that they lack.

A deadline on every wait, and a recorded flag: torch calls an event that was never recorded complete.
Waits poll `query()`; a query that hangs in a driver is beyond any deadline of this process, and is the
supervisor's to end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import torch

from stallwatch_engine.streams import bounded
from stallwatch_engine.streams.errors import NotRecorded, StreamFailed
from stallwatch_engine.streams.protocol import Stream


class AcceleratorStream:
    """A `torch.Stream` of one device. Every thread that enqueues sets its device by itself."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._name = name
        self.device = device
        self.raw: Any = torch.Stream(device=device)
        self._failure: StreamFailed | None = None
        self._at = ""

    @property
    def name(self) -> str:
        return self._name

    def enqueue(self, operation: str, work: Callable[[], None], *, on: str = "") -> None:
        self.check()
        self._at = operation
        try:
            with self.raw:
                work()
        except Exception as error:
            self._failure = StreamFailed(self._name, operation, error)
            raise self._failure from error

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def synchronize(self, deadline: float) -> None:
        event = AcceleratorEvent(self.device, f"the end of stream {self._name}")
        event.record(self)
        event.synchronize(deadline, f"stream {self._name} (last enqueued: {self._at or 'nothing'})")

    def close(self, timeout_s: float) -> None:
        self.synchronize(time.monotonic() + bounded.check_timeout(timeout_s))


class AcceleratorEvent:
    """A `torch.Event` that knows whether it was recorded."""

    def __init__(self, device: torch.device, name: str = "event") -> None:
        self._raw: Any = torch.Event(device=device)
        self._name = name
        self._recorded = False
        self._expected = bounded.Expectation()

    def record(self, stream: Stream) -> None:
        self._raw.record(cast("AcceleratorStream", stream).raw)
        self._recorded = True

    def wait(self, stream: Stream, *, on: str = "") -> None:
        self._need()
        self._raw.wait(cast("AcceleratorStream", stream).raw)

    def query(self) -> bool:
        self._need()
        return bool(self._raw.query())

    def synchronize(self, deadline: float, operation: str) -> None:
        self._need()
        bounded.wait_until(self.query, deadline, operation=operation, expected=self._expected)

    def _need(self) -> None:
        if not self._recorded:
            raise NotRecorded(f"{self._name} was never recorded")
