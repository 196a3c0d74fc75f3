"""A client's connection: requests in, one at a time, answers out."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import cast

from stallwatch.gateway.errors import bad_request
from stallwatch.gateway.exchange import Budget, End, Exchange, Outcome
from stallwatch.gateway.framing import Malformed
from stallwatch.gateway.head import MAX_HEAD, end_of_head, parse_request

WRITE_HIGH = 256 << 10
LINGER_S = 2.0  # a client that is still sending must not lose our answer to a reset
FLUSH_S = 60.0  # for what a slow client has not taken yet when its connection is to end
HEAD_S = 30.0  # for the whole head of a request
IDLE_S = 120.0  # between two requests
_KEEPALIVE = {
    socket.TCP_KEEPIDLE: 30,
    socket.TCP_KEEPINTVL: 10,
    socket.TCP_KEEPCNT: 3,
}

Begin = Callable[[Exchange], None]


class Client(asyncio.Protocol):
    """`begin` is given each request's exchange. It calls back: write, finish, break_off."""

    def __init__(
        self,
        begin: Begin,
        known: set[Client],
        *,
        budget: Budget,
        most: int,
        leaving: Callable[[], bool],
    ) -> None:
        self._begin = begin
        self._known = known
        self.budget = budget
        self._most = most
        self._leaving = leaving
        self.loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._exchange: Exchange | None = None
        self._paused = False
        self._lingering = False
        self._flush_until_s = 0.0
        self._full = False  # it takes less than is written: no further request is begun
        self.since_s = time.monotonic()  # of the idle stretch
        self.gone = False

    @property
    def exchange(self) -> Exchange | None:
        return self._exchange

    @property
    def paused(self) -> bool:
        """Nothing is read from it for now: what it does not send is not its fault."""
        return self._paused

    @property
    def reading_head(self) -> bool:
        """A request has begun and its head is not complete."""
        return self._exchange is None and bool(self._buffer) and not self._full

    @property
    def unsent(self) -> int:
        """Bytes that were written and not taken yet."""
        if self._transport is None or self.gone:
            return 0
        return self._transport.get_write_buffer_size()

    @property
    def closing(self) -> bool:
        """No further request is wanted on this connection."""
        return self._leaving()

    # -- of the loop ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if len(self._known) >= self._most:
            self._transport.abort()
            return
        self._known.add(self)
        self._transport.set_write_buffer_limits(high=WRITE_HIGH)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            # A half-open connection (the peer lost its power) ends by itself.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE.items():
                sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def data_received(self, data: bytes) -> None:
        if self._lingering:
            return
        exchange = self._exchange
        try:
            if exchange is None:
                if not self._buffer:
                    self.since_s = time.monotonic()
                self._buffer += data
                self._next()
            elif exchange.request.framing.done and not exchange.tunnel:
                self._buffer += data  # the next request, early
                if len(self._buffer) > MAX_HEAD:
                    self.pause()
            else:
                exchange.from_client(data)
        except Malformed as error:
            self._refuse(error)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone = True
        self._known.discard(self)
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.drop_upstream()  # at once: the engine must not compute for nobody
            exchange.end(Outcome(End.CLIENT_GONE))

    def pause_writing(self) -> None:
        self._full = True
        if self._exchange is not None:
            self._exchange.held_back_s = time.monotonic()
            if self._exchange.upstream is not None:
                self._exchange.upstream.pause()

    def resume_writing(self) -> None:
        self._full = False
        if self._exchange is None:
            self.since_s = time.monotonic()
            self.resume()
            if self._buffer:
                self.loop.call_soon(self._go_on)
        else:
            self._exchange.held_back_s = 0.0
            self._exchange.last_s = time.monotonic()
            if self._exchange.upstream is not None:
                self._exchange.upstream.resume()

    # -- of the exchange -----------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self.gone:
            self._transport.write(data)

    def pause(self) -> None:
        if not self._paused and self._transport is not None and not self.gone:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused and self._transport is not None and not self.gone:
            self._paused = False
            self._transport.resume_reading()

    def put_back(self, rest: bytes) -> None:
        """Bytes after the end of the request: the next one."""
        self._buffer += rest

    def finish(self, *, close: bool) -> None:
        """The answer is complete."""
        exchange, self._exchange = self._exchange, None
        self.since_s = time.monotonic()
        if close or exchange is None or not exchange.request.framing.done:
            self._close()
            return
        if not self._full:
            self.resume()
        if self._buffer:
            self.loop.call_soon(self._go_on)

    def finish_with(self, raw: bytes) -> None:
        """A whole answer of our own, the last one here."""
        self.write(raw)
        self._exchange = None
        self._close()

    def break_off(self, last: bytes, *, reset: bool) -> None:
        """End the body without its end: whoever reads it knows that it is not complete.

        reset: the body has no other end than the close, so only a reset can say that it broke.
        """
        self._exchange = None
        if reset:
            self.abort()
            return
        if last:
            self.write(last)
        self._close()

    def abort(self) -> None:
        """Close now, with a reset where one is possible."""
        if self._transport is not None and not self.gone:
            self._transport.abort()

    # -- inside --------------------------------------------------------------------------------

    def _go_on(self) -> None:
        if self._exchange is None and not self.gone and not self._lingering:
            try:
                self._next()
            except Malformed as error:
                self._refuse(error)

    def _next(self) -> None:
        """Begin the next request once its head is complete.

        Not while the client takes nothing: the loop says so once, on the way up, and an exchange
        that began after it would never hold its engine back.
        """
        if self._full:
            if len(self._buffer) > MAX_HEAD:
                self.pause()
            return
        self._buffer = self._buffer.lstrip(b"\r\n")
        at = end_of_head(self._buffer)
        if at < 0:
            return
        request = parse_request(self._buffer[:at])
        rest, self._buffer = self._buffer[at:], b""
        self._exchange = exchange = Exchange(self, request)
        self._begin(exchange)
        if rest:
            exchange.from_client(rest)

    def _refuse(self, error: Malformed) -> None:
        if self._exchange is not None:
            exchange = self._exchange
            exchange.end(Outcome(End.ENDED, answer=bad_request(str(error))))
            return
        status = 431 if len(self._buffer) >= MAX_HEAD else 400
        self._buffer = b""
        self.finish_with(bad_request(str(error), status).render())

    def _close(self) -> None:
        """Flush, say that nothing more comes, take no more than LINGER_S for the peer's part then."""
        transport = self._transport
        if transport is None or self.gone or self._lingering:
            return
        self._lingering = True
        self._flush_until_s = time.monotonic() + FLUSH_S
        self._buffer = b""
        self.resume()
        try:
            transport.write_eof()
        except (OSError, RuntimeError, NotImplementedError):
            transport.close()
            return
        self.loop.call_later(LINGER_S, self._lingered)

    def _lingered(self) -> None:
        if self.unsent and time.monotonic() < self._flush_until_s:
            self.loop.call_later(LINGER_S, self._lingered)  # an abort would cut the answer short
            return
        self.abort()
