"""What stands between a socket and an application: bounds on connections, and who the peer is."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import struct
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

CONNECTIONS = 256  # per listener; one more takes the place of one that asks nothing
PER_PEER = 64  # of them on the health address: whoever else probes has places left
HEAD_S = 10.0  # a connection whose request's head is not complete by then is closed


class Protocol(H11Protocol):
    """HTTP/1.1 with a bound on silent connections, and what the application must know of its peer.

    h11 in pure Python on purpose: the same behaviour beside vLLM, which brings httptools.
    """

    per_peer = CONNECTIONS

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        state = {**app_state, "stallwatch_abort": self._abort}
        super().__init__(config, server_state, state, _loop)
        self._silent: asyncio.TimerHandle | None = None
        self._origin = ""
        self._quiet_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._origin = origin(transport.get_extra_info("peername"))
        self._quiet_since = self.loop.time()
        if self._of_this_peer() > self.per_peer or not self._has_a_place():
            transport.abort()
            return
        peer = transport.get_extra_info("socket")
        # The family of the listener itself: a TCP peer that is gone has no address any more, and
        # "no address" must never read as "unix".
        unix = peer is not None and peer.family == socket.AF_UNIX
        self.app_state["stallwatch_unix"] = unix
        if unix:
            self.app_state["stallwatch_peer"] = _unix_peer(peer)
        self._judge_head()

    def _has_a_place(self) -> bool:
        """At the bound, the connection that has asked nothing for longest makes room.

        Whoever takes all of them, as any user of this machine can, keeps nobody out: who has a
        question asks it at once, and is the youngest then. False: every one is being answered.
        """
        if len(self.connections) <= CONNECTIONS:
            return True
        others = (each for each in self.connections if isinstance(each, Protocol))
        idle = [each for each in others if each is not self and each._is_idle()]
        if idle:
            min(idle, key=lambda each: each._quiet_since)._abort()
        return bool(idle)

    def _is_idle(self) -> bool:
        """No request is under way; half a head is none. An aborted one is on its way out."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        closing = self.transport.is_closing()
        return not closing and (cycle is None or cycle.response_complete)

    def _of_this_peer(self) -> int:
        """Connections of the same origin, this one included; not counted where there is no cap."""
        if self.per_peer >= CONNECTIONS:
            return 0
        others = (each for each in self.connections if isinstance(each, Protocol))
        return sum(each._origin == self._origin for each in others)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._judge_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_whole()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP. Uvicorn answers, though a request may be under way or answered by now,
        and then one of both answers is an error of ours with a traceback in the log.
        """
        cycle = cast("RequestResponseCycle | None", self.cycle)  # None before the first request
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # its own answer goes nowhere
            cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def _judge_head(self) -> None:
        """The clock runs while a head is waited for: from the start, and from a later one's first byte."""
        if self.conn.their_state is not h11.IDLE:
            self._quiet_since = self.loop.time()  # a head that comes byte by byte is silence
            self._head_is_whole()
        elif self._silent is None:
            self._silent = self.loop.call_later(HEAD_S, self._abort)

    def _head_is_whole(self) -> None:
        if self._silent is not None:
            self._silent.cancel()
            self._silent = None

    def _abort(self) -> None:
        if self.transport is None:
            return
        sock = self.transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            # a reset: the kernel frees what the peer never took, instead of offering it for minutes
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()


class HealthProtocol(Protocol):
    """The same with a cap per peer: this address may be open to a whole network."""

    per_peer = PER_PEER


def origin(peer: object) -> str:
    """Who counts as one peer: an IPv4 address, the /64 of an IPv6 one (a host has all of it), or ''."""
    if not isinstance(peer, tuple):
        return ""
    try:
        address = ipaddress.ip_address(str(peer[0]).partition("%")[0])
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address), 64), strict=False))


def _unix_peer(sock: Any) -> str:
    size = struct.calcsize("3i")
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    except OSError:
        return "unix socket"
    pid, uid, _ = struct.unpack("3i", raw)
    return f"uid {uid} (pid {pid})"
