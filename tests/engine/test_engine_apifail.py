"""FAILURE answers of the API process, on a real HTTP server with a fake engine behind it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading

import pytest
import uvicorn

from stallwatch.heartbeat.failure import Failure
from stallwatch_engine.vllm_plugin.apifail import Guard, Sentry

FAILURE = Failure(
    "st-20261130T031502Z-9f2c41aa",
    "chat",
    3,
    "DEVICE_WAIT",
    "worker:0/main",
    "execute_model",
    61.0,
    60.0,
    "restart",
)
pytestmark = pytest.mark.slow


class SlowApp:
    """An ASGI application that answers when it is told to, as an engine does."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.waiting = 0

    async def __call__(self, scope, receive, send) -> None:
        path = scope["path"]
        if path == "/quick":
            await self._answer(send, b"text/plain", [b"ok"])
            return
        if path == "/stream":
            await send(_start(b"text/event-stream; charset=utf-8"))
            await send({"type": "http.response.body", "body": b"data: one\n\n", "more_body": True})
        self.waiting += 1
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            if path == "/stubborn":  # vLLM's handlers answer when they are cancelled
                await self._answer(send, b"text/plain", [b"client disconnected"])
            raise
        finally:
            self.waiting -= 1
        if path == "/stream":
            await send(
                {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False}
            )
        else:
            await self._answer(send, b"text/plain", [b"done"])

    async def _answer(self, send, kind, parts) -> None:
        await send(_start(kind))
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _start(kind: bytes):
    return {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]}


class Server:
    """The guarded application on a loopback port, and the gauge it publishes."""

    def __init__(self) -> None:
        self.app = SlowApp()
        self.gauge: list[int] = []
        self.unfinished = 0
        self.guard = Guard(self.app, unfinished=lambda: self.unfinished, pending=self.gauge.append)


@contextlib.asynccontextmanager
async def serving():
    """A running server; it is told to exit and awaited, whatever happens."""
    made = Server()
    config = uvicorn.Config(made.guard, lifespan="off", log_level="critical", http="h11")
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        made.port = sock.getsockname()[1]
        config.load()
        task = asyncio.create_task(server._serve(sockets=[sock]))
        try:
            await until(lambda: server.started, 10)
            yield made
        finally:
            made.app.release.set()
            server.should_exit = server.force_exit = True
            await asyncio.wait_for(task, 10)


async def until(condition, seconds=5.0) -> None:
    """Wait for a condition of another component, with a deadline."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  what is watched has no event
            await asyncio.sleep(0.001)


async def ask(port: int, path: str, method: str = "POST") -> bytes:
    """All the bytes of one answer, until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        return await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def waiting(server: Server, count: int) -> None:
    await until(lambda: server.app.waiting >= count)


def body_of(raw: bytes) -> dict:
    return json.loads(raw.partition(b"\r\n\r\n")[2])


def run(test) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))


def test_a_waiting_request_gets_503_with_the_failure_in_an_openai_error():
    """A request without an answer ends in one explicit error, not to be retried by the library."""

    async def test():
        async with serving() as server:
            request = asyncio.create_task(ask(server.port, "/wait"))
            await waiting(server, 1)
            server.guard.fail(FAILURE)
            raw = await request
        assert raw.startswith(b"HTTP/1.1 503 ")
        assert b"x-should-retry: false" in raw
        error = body_of(raw)["error"]
        assert (error["failure_id"], error["kind"]) == (FAILURE.id, "DEVICE_WAIT")
        assert error["type"] == error["code"] == "engine_stalled"
        assert FAILURE.id in error["message"]

    run(test)


def test_a_stream_gets_an_error_event_and_is_aborted_without_its_last_chunk():
    """A client that only watches for the end of a stream must see that this one broke."""

    async def test():
        async with serving() as server:
            request = asyncio.create_task(ask(server.port, "/stream"))
            await waiting(server, 1)
            server.guard.fail(FAILURE)
            raw = await request
        assert raw.startswith(b"HTTP/1.1 200 ")
        events = [line for line in raw.split(b"\r\n") if line.startswith(b"data: ")]
        assert json.loads(events[-1][6:])["error"]["failure_id"] == FAILURE.id
        assert not raw.endswith(b"0\r\n\r\n")
        assert b"[DONE]" not in raw

    run(test)


def test_nothing_that_the_engine_says_after_the_failure_reaches_the_client():
    """A handler that answers its cancellation cannot put a second answer behind ours."""

    async def test():
        async with serving() as server:
            request = asyncio.create_task(ask(server.port, "/stubborn"))
            await waiting(server, 1)
            server.guard.fail(FAILURE)
            raw = await request
        assert raw.count(b"HTTP/1.1") == 1
        assert b"client disconnected" not in raw

    run(test)


def test_new_requests_are_refused_with_retry_after_until_the_process_is_gone():
    """A refused request may be sent again elsewhere, so it says when."""

    async def test():
        async with serving() as server:
            server.guard.fail(FAILURE)
            raw = await ask(server.port, "/quick")
            health = await ask(server.port, "/health", "GET")
        assert raw.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: " in raw.lower()
        assert b"x-should-retry" not in raw
        assert body_of(raw)["error"]["failure_id"] == FAILURE.id
        assert health.startswith(b"HTTP/1.1 503 ")

    run(test)


def test_the_pending_gauge_falls_to_zero_only_after_the_answers():
    """The supervisor kills when it reads zero: every client must have its answer by then."""

    async def test():
        async with serving() as server:
            requests = [asyncio.create_task(ask(server.port, "/wait")) for _ in range(5)]
            await waiting(server, 5)
            server.unfinished = 5
            server.guard.gauge()
            assert server.gauge == [5]
            server.guard.fail(FAILURE)
            assert server.gauge == [5, 5]
            await until(lambda: server.gauge[-1] == 0)
            answered = server.guard.answered
            server.guard.gauge()  # the beat goes on: it must not raise the gauge again
            assert server.gauge == [5, 5, 0]
            raws = await asyncio.gather(*requests)
        assert answered == 5
        assert all(raw.startswith(b"HTTP/1.1 503 ") for raw in raws)

    run(test)


def test_a_healthy_request_passes_untouched():
    """Before a failure the guard changes nothing."""

    async def test():
        async with serving() as server:
            raw = await ask(server.port, "/quick")
            request = asyncio.create_task(ask(server.port, "/stream"))
            await waiting(server, 1)
            server.app.release.set()
            stream = await request
        assert raw.startswith(b"HTTP/1.1 200 ")
        assert b"[DONE]" in stream
        assert stream.endswith(b"0\r\n\r\n")

    run(test)


def test_a_client_that_does_not_read_cannot_hold_the_others_up():
    """Answers are written side by side, and the wait for them is bounded."""

    class Deaf:
        def __init__(self) -> None:
            self.sent = 0

        async def send(self, message) -> None:
            await asyncio.Event().wait()

    async def test():
        gauge: list[int] = []
        forever = asyncio.Event()

        async def app(scope, receive, send):
            await forever.wait()

        guard = Guard(app, unfinished=lambda: 0, pending=gauge.append)
        heard: list[bytes] = []

        async def hearing(message):
            heard.append(message.get("body", b""))

        scope = {"type": "http", "path": "/x", "method": "POST"}
        deaf = asyncio.create_task(guard(scope, None, Deaf().send))
        good = asyncio.create_task(guard(scope, None, hearing))
        await asyncio.sleep(0)
        began = asyncio.get_running_loop().time()
        guard.fail(FAILURE)
        await asyncio.wait_for(good, 1)
        assert FAILURE.id.encode() in b"".join(heard)
        await until(lambda: gauge[-1] == 0)
        assert asyncio.get_running_loop().time() - began < 1.0
        deaf.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await deaf

    run(test)


def test_the_sentry_reports_a_failure_once_and_survives_an_unreadable_board():
    """The thread polls, ignores errors, and ends after the first declared failure."""
    said: list[Failure] = []
    looks = iter([None, OSError("gone"), FAILURE, FAILURE])
    done = threading.Event()

    def look():
        value = next(looks)
        if isinstance(value, Exception):
            raise value
        return value

    def on_failure(failure):
        said.append(failure)
        done.set()

    sentry = Sentry(look, on_failure, poll_s=0.001)
    sentry.start()
    assert done.wait(5)
    sentry.stop()
    assert said == [FAILURE]
    assert not sentry._thread.is_alive()


def test_a_failure_that_is_only_observed_fails_nobody():
    """`enforce = "observe"` must not touch a client even if a record reaches the board."""
    said: list[Failure] = []
    looked = threading.Semaphore(0)

    def look():
        looked.release()
        return FAILURE._replace(action="observe")

    sentry = Sentry(look, said.append, poll_s=0.001)
    sentry.start()
    for _ in range(3):
        assert looked.acquire(timeout=5)
    sentry.stop()
    assert said == []
