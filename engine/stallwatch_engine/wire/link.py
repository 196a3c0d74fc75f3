"""The api's end of the wire: an asyncio protocol that never blocks the loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

from stallwatch_engine.wire.frame import FrameDecoder, PeerBroke, PeerBusy, PeerGone, WireError
from stallwatch_engine.wire.messages import (
    Abort,
    Failed,
    Ready,
    Stats,
    Submit,
    Tokens,
    from_worker,
    pack,
)

# What a worker that does not read may leave here: a few prompts of the greatest length.
MAX_UNSENT = 16 << 20

OnMessage = Callable[[Tokens | Failed | Ready | Stats], None]
OnEnd = Callable[[WireError], None]


class ApiLink(asyncio.Protocol):
    """Calls `on_message` for each message of the worker and `on_end` once, when the link ends.

    A PeerBroke raised by `on_message` ends the link like nonsense on the wire does.
    """

    def __init__(self, on_message: OnMessage, on_end: OnEnd) -> None:
        self._on_message = on_message
        self._on_end = on_end
        self._decoder = FrameDecoder()
        self._transport: asyncio.Transport | None = None
        self._reason: WireError | None = None
        self._ended = False

    @classmethod
    async def over(cls, sock: socket.socket, on_message: OnMessage, on_end: OnEnd) -> ApiLink:
        """A link over a connected socket, which belongs to it from now on."""
        loop = asyncio.get_running_loop()
        sock.setblocking(False)
        _transport, link = await loop.create_unix_connection(
            lambda: cls(on_message, on_end), sock=sock
        )
        return link

    @property
    def unsent(self) -> int:
        """Bytes that the worker has not taken yet."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def send(self, message: Submit | Abort) -> None:
        """Queue a message. PeerGone after the end; PeerBusy when too much is queued already.

        An Abort is always queued: it is small, there is one a request, and it makes room.
        """
        if self._ended or self._transport is None or self._transport.is_closing():
            raise PeerGone("the worker is gone")
        if isinstance(message, Submit) and self.unsent > MAX_UNSENT:
            raise PeerBusy(f"the worker has left {self.unsent} bytes unread")
        self._transport.write(pack(message))

    def close(self, reason: WireError | None = None) -> None:
        """End the link; `on_end` is called with the reason soon after."""
        if self._reason is None:
            self._reason = reason
        if self._transport is not None:
            self._transport.abort()

    # asyncio's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._decoder.feed(data):
                self._on_message(from_worker(payload))
        except PeerBroke as error:
            self.close(error)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._ended:
            return
        self._ended = True
        torn = " inside a frame" if self._decoder.torn else ""
        with contextlib.suppress(Exception):  # asyncio would only log it
            self._on_end(self._reason or PeerGone(f"the worker closed its end{torn}"))
