"""What goes through the gateway comes out as it went in."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time

import pytest

from gateway_helpers import (
    CHAT,
    CLOSE,
    SSE,
    Engine,
    Peer,
    Running,
    drain,
    get,
    json_answer,
    post,
    running,
    token,
    until,
)
from stallwatch.gateway.options import Options

pytestmark = pytest.mark.slow


async def echo(peer: Peer) -> None:
    await peer.send(json_answer(b'{"ok": true}'))


async def stream(peer: Peer) -> None:
    await peer.send(SSE)
    for n in range(3):
        await peer.event(token(f"t{n}"))
    await peer.event("[DONE]")
    await peer.send(b"0\r\n\r\n")


def direct(address: str, raw: bytes) -> bytes:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(raw)
        sock.shutdown(socket.SHUT_WR)
        return drain(sock)


RECORDED = {
    "json": json_answer(b'{"a": 1}'),
    "duplicates": json_answer(b"{}", b"Set-Cookie: a=1", b"Set-Cookie: b=2", b"X-Mixed-CASE: v"),
    "empty": b"HTTP/1.1 204 No Content\r\nX-A: b\r\n\r\n",
    "error": b'HTTP/1.1 404 Not Found\r\ncontent-length: 7\r\nserver: u\r\n\r\n{"x":1}',
    "reason": b"HTTP/1.1 418 I'm a teapot, really\r\ncontent-length: 0\r\n\r\n",
    "stream": SSE + b'd\r\ndata: {"x":1}\r\n'[:0] + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n",
    "extension": (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n"
        b"Trailer: X-Sum\r\n\r\n5;name=v\r\nhello\r\n1\r\n!\r\n0\r\nX-Sum: 7\r\n\r\n"
    ),
    "binary": b"HTTP/1.1 200 OK\r\ncontent-type: audio/wav\r\ncontent-length: 256\r\n\r\n"
    + bytes(range(256)),
    "hint": b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + json_answer(b"{}"),
    "large": json_answer(b"[" + b"1," * 400_000 + b"1]"),
}


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_answers_come_through_byte_for_byte(name):
    """Status line, header case, order and duplicates, chunks, extensions and trailers are untouched."""

    async def script(peer: Peer) -> None:
        await peer.send(RECORDED[name])

    with running(script) as gateway:
        with gateway.connect() as sock:
            sock.sendall(post("/v1/any", {}))
            got = b""
            while len(got) < len(RECORDED[name]):
                data = sock.recv(1 << 16)
                assert data, got
                got += data
        wanted = RECORDED[name].replace(
            b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"
        )
        assert got == wanted
        assert direct(gateway.engines[0].address, post("/v1/any", {})) == got


def test_request_heads_and_bodies_reach_the_engine_as_they_were_written():
    """Names keep their case, duplicates their order; only what belongs to the connection is gone."""
    raw = (
        b"POST /v1/x?a=%20b&c HTTP/1.1\r\nHost: h\r\nX-One: 1\r\nx-one: 2\r\nAuthorization: Bearer k\r\n"
        b"Connection: X-Hop\r\nX-Hop: gone\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3;e=1\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    )
    with running(echo) as gateway:
        with gateway.connect() as sock:
            sock.sendall(raw)
            assert b'{"ok": true}' in sock.recv(1 << 16)
        head, body = gateway.engines[0].requests[0]
        assert head == raw.partition(b"3;e")[0].replace(
            b"Connection: X-Hop\r\nX-Hop: gone\r\n", b""
        )
        assert body == b"abcde"


def test_connections_are_kept_on_both_sides():
    """Fifty requests of one client are fifty answers over one connection to the engine."""
    with running(echo) as gateway, gateway.connect() as sock:
        file = sock.makefile("rb")
        for _ in range(50):
            sock.sendall(post("/v1/embeddings", {"input": "x"}))
            assert file.readline() == b"HTTP/1.1 200 OK\r\n"
            while file.readline() != b"\r\n":
                pass
            assert file.read(12) == b'{"ok": true}'
        assert gateway.engines[0].connections == 1


def test_pipelined_requests_are_answered_in_order():
    """Three requests in one segment: three answers, each to its own."""

    async def script(peer: Peer) -> None:
        await peer.send(json_answer(peer.body))

    with running(script) as gateway:
        raw = b"".join(post("/v1/x", n) for n in (1, 2)) + post("/v1/x", 3, CLOSE)
        got = gateway.raw(raw)
        assert [part[-1:] for part in got.split(b"HTTP/1.1 200 OK")[1:]] == [b"1", b"2", b"3"]


def test_each_event_is_passed_on_when_it_comes():
    """The second event is sent only after the client has read the first."""
    go = threading.Event()

    async def script(peer: Peer) -> None:
        await peer.send(SSE)
        await peer.event(token("first"))
        while not go.is_set():
            await __import__("asyncio").sleep(0.005)
        await peer.event("[DONE]")
        await peer.send(b"0\r\n\r\n")

    with running(script) as gateway, gateway.connect() as sock:
        sock.sendall(post(CHAT, {"stream": True}))
        got = b""
        while b"first" not in got:
            got += sock.recv(4096)
        go.set()
        while not got.endswith(b"0\r\n\r\n"):
            got += sock.recv(4096)


def test_ten_megabytes_go_both_ways():
    """A long upload and a long answer arrive whole, and the gateway's buffers stay bounded."""
    payload = os.urandom(1 << 20) * 10

    async def script(peer: Peer) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: audio/wav\r\ncontent-length: %d\r\n\r\n"
        await peer.send(head % len(peer.body), peer.body)

    with running(script) as gateway:
        request = (
            b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: h\r\nConnection: close\r\n"
            b"Content-Length: %d\r\n\r\n" % len(payload)
        )
        with gateway.connect() as sock:
            sender = threading.Thread(target=sock.sendall, args=(request + payload,))
            sender.start()
            got = drain(sock)
            sender.join(10)
        assert got.partition(b"\r\n\r\n")[2] == payload


def test_a_slow_reader_holds_up_the_engine_and_nobody_else():
    """Nobody reads 64 MiB: the engine is not drained, others are served, and the reader is dropped."""
    sent = [0]

    async def script(peer: Peer) -> None:
        if b"/v1/other" in peer.head:
            await echo(peer)
            return
        await peer.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: audio/wav\r\ncontent-length: 67108864\r\n\r\n"
        )
        for _ in range(1024):
            await peer.send(bytes(65536))
            sent[0] += 65536

    with running(script, slow_client=0.5) as gateway, gateway.connect() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        sock.sendall(post("/v1/x", {}))
        assert b'"ok"' in gateway.raw(post("/v1/other", {}, CLOSE))
        assert gateway.engines[0].hung_up.wait(10)
        assert sent[0] < 32 << 20
        until(lambda: gateway.total("client_gone") == 1, what="the slow client is dropped")


def test_a_disconnect_aborts_the_engines_request_at_once():
    """The client closes in the middle of a stream: the engine's connection ends within a second."""

    async def script(peer: Peer) -> None:
        await peer.send(SSE)
        await peer.event(token("x"))
        await peer.gone()

    with running(script) as gateway:
        with gateway.connect() as sock:
            sock.sendall(post(CHAT, {"stream": True}))
            sock.recv(4096)
        began = time.monotonic()
        assert gateway.engines[0].hung_up.wait(5)
        assert time.monotonic() - began < 1.0
        until(lambda: gateway.total("client_gone") == 1, what="it is counted")


def test_a_unix_socket_may_be_the_upstream():
    """unix:PATH works as HOST:PORT does."""
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(stream, path=f"{folder}/s")
        with Running(Options(), [engine]) as gateway:
            got = gateway.raw(post(CHAT, {"stream": True}, CLOSE))
            assert got.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_an_old_client_gets_a_body_without_chunks():
    """HTTP/1.0 goes upstream as HTTP/1.0, so that the engine itself chooses a body it can read."""

    async def script(peer: Peer) -> None:
        assert b" HTTP/1.0\r\n" in peer.head
        await peer.send(b"HTTP/1.0 200 OK\r\ncontent-type: text/plain\r\n\r\nhello")
        peer.writer.close()

    with running(script) as gateway:
        got = gateway.raw(b"GET /health HTTP/1.0\r\n\r\n")
        assert got.startswith(b"HTTP/1.0 200 OK\r\n")
        assert got.endswith(b"\r\n\r\nhello")


def test_a_websocket_becomes_a_tunnel():
    """After 101 bytes go both ways untouched, and an end is an end on both sides."""

    async def script(peer: Peer) -> None:
        assert b"Upgrade: websocket" in peer.head
        await peer.send(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\nhi"
        )
        await peer.send(await peer.reader.read(100))
        peer.writer.close()

    with running(script) as gateway, gateway.connect() as sock:
        sock.sendall(get("/v1/realtime", "Connection: Upgrade", "Upgrade: websocket"))
        got = b""
        while not got.endswith(b"hi"):
            got += sock.recv(4096)
        sock.sendall(b"\x81\x03abc")
        assert drain(sock) == b"\x81\x03abc"


def test_a_thousand_idle_connections_cost_nobody_anything():
    """With 1,000 silent connections open, a request is served, and the next ones are too."""
    with running(echo) as gateway:
        idle = [gateway.connect() for _ in range(1000)]
        try:
            until(
                lambda: gateway.call(lambda: len(gateway.gateway.clients)) == 1000, what="all open"
            )
            assert b'"ok"' in gateway.raw(post("/v1/x", {}, CLOSE))
        finally:
            for sock in idle:
                sock.close()
        until(lambda: gateway.call(lambda: len(gateway.gateway.clients)) == 0, what="all closed")


def test_expect_continue_is_the_engines_to_answer():
    """100 Continue comes from the engine, and the body follows it."""

    async def script(peer: Peer) -> None:
        await echo(peer)

    class Waiting(Peer):
        pass

    async def once(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"Expect: 100-continue" in head
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert await reader.readexactly(5) == b"hello"
        writer.write(json_answer(b"{}"))
        await writer.drain()
        writer.close()

    engine = Engine(script)
    engine._serve = once
    with Running(Options(), [engine]) as gateway, gateway.connect() as sock:
        sock.sendall(
            b"POST /v1/x HTTP/1.1\r\nHost: h\r\nConnection: close\r\nExpect: 100-continue\r\n"
            b"Content-Length: 5\r\n\r\n"
        )
        assert sock.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(b"hello")
        assert drain(sock).endswith(b"{}")
