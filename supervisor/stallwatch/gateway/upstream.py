"""Connections to one replica, kept alive between requests."""

from __future__ import annotations

import asyncio
import contextlib
import select
import time
from collections import deque
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from stallwatch.gateway.exchange import Exchange

CONNECT_S = 5.0
# uvicorn closes an idle connection after 5 s: one that is used for less cannot be met half closed.
IDLE_S = 2.0
IDLE_MOST = 256
WRITE_HIGH = 256 << 10
READ = 256 << 10
_ENDED = select.POLLIN | select.POLLRDHUP | select.POLLHUP | select.POLLERR


class Upstream(asyncio.BufferedProtocol):
    """One connection. It belongs to at most one exchange.

    A buffered protocol, because the plain one gets 256 KiB of fresh memory from the kernel for each
    read of an event of 150 bytes.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.address = pool.address
        self._transport: asyncio.Transport | None = None
        self.exchange: Exchange | None = None
        self.idle_since_s = 0.0
        self.reused = False
        self.closed = False

    # -- of the loop ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=WRITE_HIGH)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.pool.buffer

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(self.pool.buffer[:nbytes])
        if self.exchange is not None:
            self.exchange.from_upstream(data)
        else:
            self.abort()  # nobody asked

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        exchange, self.exchange = self.exchange, None
        self.pool.forget(self)
        if exchange is not None:
            exchange.upstream = None
            exchange.upstream_closed(f"connection lost ({exc})" if exc else "connection closed")

    def pause_writing(self) -> None:
        if self.exchange is not None:
            self.exchange.client.pause()

    def resume_writing(self) -> None:
        if self.exchange is not None:
            self.exchange.client.resume()

    # -- of the exchange -----------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self.closed:
            self._transport.write(data)

    def ended(self) -> bool:
        """It cannot take a request: it was closed, or holds bytes that nobody asked for.

        The kernel is asked, for the loop may not have told yet, and a request that is written now
        would be one of which nobody knows whether it was read.
        """
        if self.closed or self._transport is None:
            return True
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), _ENDED)
        return bool(poll.poll(0))

    def pause(self) -> None:
        if self._transport is not None and not self.closed:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and not self.closed:
            self._transport.resume_reading()

    def release(self, *, reusable: bool) -> None:
        """The exchange is over."""
        self.exchange = None
        if reusable and not self.closed:
            self.resume()
            self.pool.put(self)
        else:
            self.abort()

    def abort(self) -> None:
        """Close without a word: the engine sees it as its client's disconnect."""
        self.exchange = None
        if self._transport is not None:
            self._transport.abort()


class Pool:
    """How to reach one replica: 'HOST:PORT' or 'unix:PATH'."""

    def __init__(self, address: str) -> None:
        self.address = address
        # One for all connections: the loop fills it and hands it over in one go.
        self.buffer = memoryview(bytearray(READ))
        self.last_s = 0.0  # when the engine sent a byte of any answer
        self._idle: deque[Upstream] = deque()

    async def take(self) -> Upstream:
        """A connection that may be used at once. Raises OSError or TimeoutError."""
        now = time.monotonic()
        while self._idle:
            kept = self._idle.pop()
            if now - kept.idle_since_s < IDLE_S and not kept.ended():
                kept.reused = True
                return kept
            kept.abort()
        return await self.fresh()

    async def fresh(self) -> Upstream:
        """A new connection. Raises OSError or TimeoutError."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_S):
            if self.address.startswith("unix:"):
                path = self.address.removeprefix("unix:")
                _, made = await loop.create_unix_connection(lambda: Upstream(self), path)
                return made
            host, _, port = self.address.rpartition(":")
            host = host.removeprefix("[").removesuffix("]")
            _, made = await loop.create_connection(lambda: Upstream(self), host, int(port))
            return made

    def move(self, address: str) -> None:
        """Another address: connections to the old one are not used again."""
        self.address = address
        self.close()

    def put(self, upstream: Upstream) -> None:
        if upstream.address != self.address:
            upstream.abort()
            return
        upstream.idle_since_s = time.monotonic()
        self._idle.append(upstream)
        if len(self._idle) > IDLE_MOST:
            self._idle.popleft().abort()

    def forget(self, upstream: Upstream) -> None:
        with contextlib.suppress(ValueError):
            self._idle.remove(upstream)

    def sweep(self) -> None:
        """Close what was idle for too long."""
        now = time.monotonic()
        while self._idle and now - self._idle[0].idle_since_s >= IDLE_S:
            self._idle.popleft().abort()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().abort()
