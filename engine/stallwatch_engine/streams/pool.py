"""Events to borrow: as many as steps may be in flight, and none handed on while somebody may wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from stallwatch_engine.streams.errors import OverContract
from stallwatch_engine.streams.protocol import Event

MAX_ABANDONED = 16


class Lease:
    """One borrowed event. It goes back when everybody who may wait for it has released it."""

    def __init__(self, pool: EventPool, event: Event) -> None:
        self.event = event
        self._pool = pool
        self._holders = 1

    def retain(self) -> Lease:
        """One more may wait for the event; each one releases."""
        with self._pool.lock:
            self._live()
            self._holders += 1
        return self

    def release(self) -> None:
        """Wait no longer."""
        with self._pool.lock:
            self._live()
            self._holders -= 1
            if self._holders == 0:
                self._pool.give(self.event)

    def abandon(self) -> None:
        """The wait timed out: the device may still complete the event, so nobody gets it again."""
        with self._pool.lock:
            self._live()
            self._holders = 0
            self._pool.replace()

    def _live(self) -> None:
        if self._holders == 0:
            raise RuntimeError("this event went back to its pool: it must not be used any more")


class EventPool:
    """`size` events, made once. Running out raises, because waiting would hide who holds them."""

    def __init__(self, make: Callable[[], Event], size: int) -> None:
        if size < 1:
            raise ValueError(f"an event pool holds at least one event, not {size}")
        self.lock = threading.Lock()
        self.size = size
        self._make = make
        self._free = [make() for _ in range(size)]
        self._abandoned = 0

    @property
    def free(self) -> int:
        """How many can be taken now."""
        return len(self._free)

    def take(self) -> Lease:
        """Borrow one; OverContract when all are out."""
        with self.lock:
            if not self._free:
                raise OverContract("events of steps in flight", self.size)
            return Lease(self, self._free.pop())

    # For Lease, with the lock held.

    def give(self, event: Event) -> None:
        self._free.append(event)

    def replace(self) -> None:
        """A fresh event in place of one that may still complete, a bounded number of times."""
        self._abandoned += 1
        if self._abandoned <= MAX_ABANDONED:
            self._free.append(self._make())
