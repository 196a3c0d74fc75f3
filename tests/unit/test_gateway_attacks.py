"""Clients and engines that use the gateway against itself: slow, deaf, pipelined, dying at the wrong moment."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time

import pytest

from gateway_helpers import (
    CHAT,
    CLOSE,
    Engine,
    Peer,
    Running,
    drain,
    get,
    json_answer,
    post,
    running,
    until,
)
from stallwatch.gateway import client as client_module
from stallwatch.gateway import exchange as exchange_module
from stallwatch.gateway.framing import Length, Malformed, UntilClose
from stallwatch.gateway.head import parse_request, parse_response
from stallwatch.gateway.options import Options

BIG = b"y" * 250_000
EVENT = b'data: {"a": 1}\n\n'


async def silent(peer: Peer) -> None:
    await peer.gone()


async def big(peer: Peer) -> None:
    await peer.send(json_answer(BIG))


class Deaf(Engine):
    """Takes connections and reads nothing from them."""

    async def start(self) -> asyncio.Server:
        self._end = asyncio.Event()
        server = await asyncio.start_server(self._deaf, "127.0.0.1", 0, limit=1024)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    async def _deaf(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._end.wait()
        finally:
            writer.transport.abort()


class Mortal(Engine):
    """Its process ends with a request whose body says so: listener and connection are gone."""

    async def start(self) -> asyncio.Server:
        self.server = await super().start()
        return self.server


@contextlib.contextmanager
def slow_line(gateway: Running):
    """A client whose connection holds next to nothing on the way, in both kernels' buffers."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(10)
        sock.connect(("127.0.0.1", gateway.port))
        known = until(
            lambda: gateway.call(lambda: next(iter(gateway.gateway.clients), None)), what="client"
        )
        inner = known._transport.get_extra_info("socket")
        gateway.call(lambda: inner.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096))
        yield sock, known


def passes(seconds: float) -> None:
    """Time goes by."""
    end = time.monotonic() + seconds
    until(lambda: time.monotonic() > end, what="time")


@pytest.mark.slow
class TestClients:
    def test_one_that_pipelines_and_never_reads_is_held_back(self):
        """Two hundred requests at once, no answer taken: the gateway keeps a few, and goes on when read."""
        with running(big) as gateway, gateway.connect() as sock:
            sock.sendall(get("/v1/models") * 199 + get("/v1/models", CLOSE))
            known = until(
                lambda: gateway.call(lambda: next(iter(gateway.gateway.clients), None)),
                what="client",
            )
            until(
                lambda: gateway.call(lambda: known.unsent) > client_module.WRITE_HIGH, what="full"
            )
            passes(0.5)
            assert gateway.call(lambda: known.unsent) < client_module.WRITE_HIGH + 2 * len(BIG)
            assert len(gateway.engines[0].requests) < 100
            assert drain(sock).count(b"HTTP/1.1 200") == 200

    def test_a_slow_one_gets_all_of_its_last_answer(self, monkeypatch):
        """The connection is to end, and the rest of the answer is still on its way: it is not cut."""
        monkeypatch.setattr(client_module, "LINGER_S", 0.1)
        with running(big) as gateway, slow_line(gateway) as (sock, known):
            sock.sendall(get("/v1/models", CLOSE))
            until(lambda: gateway.total("answered") == 1, what="answered")
            passes(0.5)
            assert drain(sock).endswith(BIG)
            until(lambda: gateway.call(lambda: known.gone), what="closed")

    def test_one_that_takes_nothing_of_its_last_answer_is_dropped(self, monkeypatch):
        """The wait for a slow client has an end."""
        monkeypatch.setattr(client_module, "LINGER_S", 0.1)
        monkeypatch.setattr(client_module, "FLUSH_S", 0.3)
        with running(big) as gateway, slow_line(gateway) as (sock, known):
            sock.sendall(get("/v1/models", CLOSE))
            until(lambda: gateway.call(lambda: known.gone), what="dropped")

    def test_a_body_in_drops_ends(self, monkeypatch):
        """A byte now and then keeps no place among the requests in flight."""
        monkeypatch.setattr(exchange_module, "FED_LEAST", 64)
        with running(silent, slow_client=0.4) as gateway, gateway.connect() as sock:
            sock.sendall(b"POST /x HTTP/1.1\r\nHost: g\r\nContent-Length: 99999\r\n\r\n")
            sock.settimeout(0.05)
            for _ in range(100):
                sock.sendall(b"x")
                with contextlib.suppress(TimeoutError):
                    assert b" 408 " in sock.recv(4096)
                    break
            else:
                pytest.fail("it was never ended")


@pytest.mark.slow
class TestEngines:
    def test_one_that_reads_no_body_is_told(self):
        """An upload that the engine does not take is a silence of the engine, not of its client."""
        with (
            Running(Options(first_token=0.3), [Deaf(silent)]) as gateway,
            gateway.connect() as sock,
        ):
            sock.settimeout(0.3)
            sock.sendall(b"POST /x HTTP/1.1\r\nHost: g\r\nContent-Length: 99999999\r\n\r\n")
            with contextlib.suppress(TimeoutError):
                while True:
                    sock.send(b"x" * 65536)
            until(lambda: gateway.silent, what="told")
            assert {s.phase for s in gateway.silent} == {"body"}

    def test_one_that_died_of_a_request_takes_no_other_with_it(self):
        """retry = "never": the request that ended it on a kept connection goes to nobody else."""

        async def mortal(peer: Peer) -> None:
            if b"die" in peer.body:
                mine.server.close()
                peer.writer.transport.abort()
                return
            await peer.send(json_answer(b"{}"))

        async def well(peer: Peer) -> None:
            await peer.send(json_answer(b"{}"))

        mine = Mortal(mortal)
        with Running(Options(), [mine, Engine(well)]) as gateway:
            gateway.state("b", "starting")
            with gateway.connect() as first:
                first.sendall(post(CHAT, {}))
                assert b" 200 " in first.recv(4096)
                gateway.state("b", "ready")
                other = gateway.call(lambda: gateway.gateway.router.replicas["b"])
                other.pool.last_s = time.monotonic()  # the less idle one: not the first choice
                found = gateway.raw(post(CHAT, {"say": "die"}, CLOSE))
            assert b"engine_stalled" in found
            assert [body for _, body in gateway.engines[1].requests] == []

    def test_without_a_supervisor_its_silence_is_ended_here(self):
        """Nobody is left who could find out why: the client is answered at the limit."""
        with running(silent, whole_answer=0.3) as gateway, gateway.connect() as sock:
            sock.sendall(post(CHAT, {}))
            gateway.wait_sent(1)
            gateway.call(gateway.gateway.router.orphaned)
            found = drain(sock)
            assert found.startswith(b"HTTP/1.1 504 ")
            assert b"engine_silent" in found

    def test_incarnations_that_count_anew_are_not_those_that_failed(self):
        """A daemon that lost its state begins at 1 again: its engine is used."""
        with running(big) as gateway:
            gateway.state("a", "ready", incarnation=7)
            gateway.fail("a")
            assert b" 503 " in gateway.raw(post(CHAT, {}))[:20]
            gateway.state("a", "ready", incarnation=1)
            assert b" 200 " in gateway.raw(post(CHAT, {}, CLOSE))[:20]


@pytest.mark.slow
class TestStreamsOfKnownLength:
    @staticmethod
    def head(length: int) -> bytes:
        kind = b"content-type: text/event-stream\r\ncontent-length: %d" % length
        return b"HTTP/1.1 200 OK\r\n" + kind + b"\r\n\r\n"

    @pytest.mark.parametrize("length", [60, 4000])
    def test_a_failure_never_fills_it_up(self, length):
        """The body stays shorter than it said, so that no client takes it for complete."""

        async def part(peer: Peer) -> None:
            await peer.send(self.head(length), EVENT)
            await peer.gone()

        with running(part) as gateway, gateway.connect() as sock:
            sock.sendall(post(CHAT, {"stream": True}))
            found = b""
            while EVENT not in found:
                found += sock.recv(4096)
            failure = gateway.fail("a")
            found += drain(sock)
            body = found.partition(b"\r\n\r\n")[2]
            assert len(body) < length
            assert (failure.id.encode() in body) == (length == 4000)

    def test_a_whole_one_is_an_answer(self):
        """It ends with [DONE]: nothing is missing."""
        body = EVENT + b"data: [DONE]\n\n"

        async def whole(peer: Peer) -> None:
            await peer.send(self.head(len(body)), body)

        with running(whole) as gateway:
            assert gateway.raw(post(CHAT, {"stream": True}, CLOSE)).endswith(body)
            until(lambda: gateway.total("answered") == 1, what="answered")


def test_a_head_ends_where_everybody_sees_its_end():
    """An empty line of bare line feeds would hide what follows it from one reader and not from another."""
    hidden = b"GET /a HTTP/1.1\r\nHost: g\n\nGET /b HTTP/1.1\r\nHost: g\r\n\r\n"
    with pytest.raises(Malformed):
        parse_request(hidden)
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\n\nHTTP/1.1 200 OK\r\n\r\n"
    with pytest.raises(Malformed):
        parse_response(answer, b"GET")


@pytest.mark.parametrize("framing", [UntilClose(), Length(100, events=True)])
def test_half_an_event_is_no_whole_one(framing):
    """Not one byte of an event that is not complete is called safe."""
    framing.feed(b'data: {"a"')
    assert framing.safe == 0
    framing.feed(b": 1}\n\nda")
    assert framing.safe == len(b": 1}\n\n")
