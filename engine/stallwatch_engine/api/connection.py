"""A client's connection: uvicorn's, with an end for those that never say what they want."""

from __future__ import annotations

import asyncio
import contextlib
import resource

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 30.0  # for the whole head of a request; uvicorn's own timers know only idle connections
MOST = 4096  # connections at once


class Connection(H11Protocol):
    """Ended when a head is not complete in time, or when there are too many already."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MOST:
            transport.abort()
            return
        self._judge()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._judge()

    def connection_lost(self, exc: Exception | None) -> None:
        self._in_time()
        super().connection_lost(exc)

    def _judge(self) -> None:
        """The clock runs from the first moment without a whole head to the one with it."""
        if self.conn.their_state is not h11.IDLE:
            self._in_time()
        elif self._late is None:
            self._late = self.loop.call_later(HEAD_S, self.transport.abort)

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def many_files() -> None:
    """One descriptor for each connection: the soft limit of 1,024 is soon reached."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
