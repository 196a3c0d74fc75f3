"""A gateway in a thread, with a supervisor that says what a test wants, and scripted upstreams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Self

from stallwatch.gateway.errors import Failure
from stallwatch.gateway.gateway import Gateway
from stallwatch.gateway.options import Options
from stallwatch.gateway.replica import View
from stallwatch.gateway.watch import Watch

DEADLINE_S = 10.0
Script = Callable[["Peer"], Awaitable[None]]


def until(condition: Callable[[], Any], *, seconds: float = DEADLINE_S, what: str) -> Any:
    """The condition's first true value, or AssertionError."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.01)  # a poll with a deadline
    raise AssertionError(f"not within {seconds:g} s: {what}")


class Peer:
    """One request as a scripted upstream sees it, and the pen for its answer."""

    def __init__(
        self, engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.engine, self.reader, self.writer = engine, reader, writer
        self.head = b""
        self.body = b""

    async def take(self) -> bool:
        """Read one request; False at the end of the connection."""
        try:
            self.head = await self.reader.readuntil(b"\r\n\r\n")
            low = self.head.lower()
            self.body = b""
            if b"content-length:" in low:
                size = int(low.split(b"content-length:")[1].split(b"\r\n")[0])
                self.body = await self.reader.readexactly(size)
            elif b"transfer-encoding: chunked" in low:
                while True:
                    line = await self.reader.readline()
                    size = int(line.split(b";")[0], 16)
                    self.body += await self.reader.readexactly(size)
                    if not size:
                        await self.reader.readuntil(b"\r\n")
                        break
                    await self.reader.readexactly(2)
        except (asyncio.IncompleteReadError, ConnectionError):
            return False
        return True

    async def send(self, *parts: bytes) -> None:
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()

    async def event(self, text: str) -> None:
        data = f"data: {text}\n\n".encode()
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def gone(self) -> None:
        """Wait until the gateway hangs up."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65536):
                pass


class Engine:
    """A server that does to each request what its script says."""

    def __init__(self, script: Script, *, path: str = "") -> None:
        self.script = script
        self.path = path
        self.requests: list[tuple[bytes, bytes]] = []
        self.hung_up = threading.Event()
        self.connections = 0
        self.address = ""

    async def start(self) -> asyncio.Server:
        if self.path:
            server = await asyncio.start_unix_server(self._serve, self.path, limit=1 << 24)
            self.address = f"unix:{self.path}"
        else:
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 24)
            port = server.sockets[0].getsockname()[1]
            self.address = f"127.0.0.1:{port}"
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        peer = Peer(self, reader, writer)
        try:
            while await peer.take():
                self.requests.append((peer.head, peer.body))
                await self.script(peer)
                if writer.is_closing():
                    break
        except ConnectionError:
            pass
        finally:
            self.hung_up.set()
            with contextlib.suppress(ConnectionError):
                writer.close()
                await writer.wait_closed()


class Running:
    """A gateway and its engines on a loop in a thread. Engines are called a, b, c, ..."""

    def __init__(self, options: Options, engines: list[Engine]) -> None:
        self.engines = engines
        self.options = options
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.port = 0
        self.error: list[dict[str, Any]] = []
        self.silent: list[Any] = []

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._up.wait(DEADLINE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        assert not self.error, self.error

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(lambda _loop, context: self._broke(context))
        try:
            self._loop.run_until_complete(self._main())
        finally:
            self._loop.close()

    def _broke(self, context: dict[str, Any]) -> None:
        # asyncio's stream server reports its own handlers as broken when they are cancelled
        if not isinstance(context.get("exception"), asyncio.CancelledError):
            self.error.append(context)

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        servers = [await engine.start() for engine in self.engines]
        self.gateway = Gateway(self.options)
        self.watch = Watch(self.gateway)
        server = await self._loop.create_server(self.gateway.connection, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self.views = {
            chr(97 + i): (engine.address, View("ready", ready=True, incarnation=1))
            for i, engine in enumerate(self.engines)
        }
        self.gateway.router.learn(self.views)
        self._up.set()
        while not self._stop.is_set():
            self.watch.turn()
            self.silent += self.watch.silent
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.02):
                    await self._stop.wait()
        server.close()
        await self.gateway.leave(0.0)
        for each in servers:
            each.close()
        tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- the supervisor's part -----------------------------------------------------------------

    def call(self, work: Callable[[], Any]) -> Any:
        """Run it in the gateway's loop and wait for its result."""
        done: list[Any] = []
        over = threading.Event()

        def turn() -> None:
            try:
                done.append(work())
            finally:
                over.set()

        self._loop.call_soon_threadsafe(turn)
        assert over.wait(DEADLINE_S)
        return done[0]

    def state(self, name: str, state: str, *, incarnation: int = 1, **more: Any) -> None:
        """more: enforce, comes_back."""
        ready = state in ("ready", "suspect")
        view = View(state, ready=ready, incarnation=incarnation, **more)
        self.views[name] = (self.views[name][0], view)
        self.call(lambda: self.gateway.router.learn(self.views))

    def fail(self, name: str, number: int = 1, *, incarnation: int | None = None) -> Failure:
        """A FAILURE of the present incarnation, or of another one."""
        if incarnation is None:
            incarnation = self.views[name][1].incarnation
        id_ = f"st-20261130T000000Z-{number:08x}"
        failure = Failure(id_, "DEVICE_WAIT", f"engine {name} failed", incarnation)
        self.call(lambda: self.gateway.router.fail(name, failure))
        return failure

    # -- clients -------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE_S)

    def raw(self, request: bytes) -> bytes:
        """Send it, read until the connection ends (a reset counts as an end)."""
        with self.connect() as sock:
            sock.sendall(request)
            return drain(sock)

    def total(self, word: str) -> int:
        return int(self.call(lambda: self.gateway.totals[word]))

    def wait_in_flight(self, count: int) -> None:
        until(lambda: self.call(lambda: self.gateway.in_flight) == count, what=f"{count} in flight")

    def wait_sent(self, count: int) -> None:
        """So many requests have reached the engines."""
        until(lambda: sum(len(e.requests) for e in self.engines) >= count, what=f"{count} sent")


def drain(sock: socket.socket) -> bytes:
    found = bytearray()  # it may be fifty megabytes in small pieces
    with contextlib.suppress(ConnectionError):
        while data := sock.recv(1 << 16):
            found += data
    return bytes(found)


def post(path: str, body: Any, *more: str) -> bytes:
    raw = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: gateway", f"Content-Length: {len(raw)}", *more]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + raw


def get(path: str, *more: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: gateway", *more]).encode() + b"\r\n\r\n"


CLOSE = "Connection: close"
CHAT = "/v1/chat/completions"
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


def json_answer(body: bytes, *more: bytes) -> bytes:
    extra = b"".join(line + b"\r\n" for line in more)
    return (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%b\r\n%b"
        % (len(body), extra, body)
    )


def token(text: str, finish: str | None = None) -> str:
    """A chunk of a streamed chat completion."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return json.dumps(
        {
            "id": "c",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "m",
            "choices": [choice],
        }
    )


def completion(text: str) -> bytes:
    """A whole chat completion."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return json.dumps(
        {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    ).encode()


@contextlib.contextmanager
def running(*scripts: Script, **options: Any) -> Iterator[Running]:
    """A gateway before one engine for each script."""
    with Running(Options(**options), [Engine(script) for script in scripts]) as found:
        yield found
