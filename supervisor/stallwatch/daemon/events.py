"""What happened, in order: a bounded ring that any thread may append to, read or wait on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from stallwatch.clock import Clock
from stallwatch.control.service import Event
from stallwatch.evidence.redact import Redactor

Sink = Callable[[Event], None]
_NOTHING_KNOWN = Redactor()


def rfc3339(wall: float) -> str:
    """Seconds since the epoch as RFC 3339 in UTC, with milliseconds."""
    return (
        datetime.fromtimestamp(wall, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )


class EventRing:
    """The last `capacity` events. Ids grow by one from the time at which the daemon began.

    So an id that a client brings from an earlier daemon is below all of ours, and nothing that is
    new is taken for something it has seen. Microseconds since the epoch: exact in a JSON number for
    two centuries, and no daemon has told more than a million events for each second of its life.
    """

    def __init__(self, clock: Clock, *, capacity: int = 4096, sinks: Sequence[Sink] = ()) -> None:
        self._clock = clock
        self._ring: deque[Event] = deque(maxlen=capacity)
        self.begin = int(clock.wall() * 1e6)  # below every id
        self._next = self.begin + 1
        self._sinks = tuple(sinks)
        self.redactors: dict[str, Redactor] = {}  # by engine; what it was given as secrets
        self._changed = threading.Condition()

    def emit(self, engine: str, type_: str, message: str, **data: Any) -> Event:
        """Record one event and wake every waiter. Sinks run in the caller's thread."""
        redactor = self.redactors.get(engine, _NOTHING_KNOWN)
        message, data = redactor.redact(message), redactor.redact_all(data)
        with self._changed:
            event = Event(
                id=self._next,
                at=rfc3339(self._clock.wall()),
                engine=engine,
                type=type_,
                message=message,
                data=data,
            )
            self._next += 1
            self._ring.append(event)
            self._changed.notify_all()
        for sink in self._sinks:
            sink(event)
        return event

    def after(self, last: int, limit: int = 1000) -> list[Event]:
        """Events with an id above `last`, oldest first."""
        with self._changed:
            return self._after(last)[:limit]

    def wait(self, last: int, timeout_s: float) -> list[Event]:
        """Like after(), but waits up to `timeout_s` for there to be one."""
        with self._changed:
            self._changed.wait_for(lambda: self._newest() > last, timeout=timeout_s)
            return self._after(last)

    def _newest(self) -> int:
        return self._ring[-1].id if self._ring else 0

    def _after(self, last: int) -> list[Event]:
        return [event for event in self._ring if event.id > last]
