"""/v1/events: one reader of the service, many clients, none of which can hold up another."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stallwatch.control.service import Event, Service
from stallwatch.control.views import dumps, event_json

log = logging.getLogger("stallwatch.control")

QUEUE = 256  # events a client may lag behind; then it is dropped and comes back with its last id
CLIENTS = 64
OWN = (
    16  # more of them over the unix socket: the gateway must hear of a FAILURE whoever listens too
)
HEARTBEAT_S = 15.0  # under the usual 30-60 s idle timeouts of proxies
SEND_S = 10.0  # a client that takes nothing for this long is dropped
_POLL_S = 0.25  # how long a stop may wait for the reader
_PAGE = 500


class Client:
    """One listener's bounded queue. None in it: the stream ends."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Event | None] = asyncio.Queue(QUEUE)
        self.dropped = asyncio.Event()

    def offer(self, event: Event | None) -> None:
        try:
            self.queue.put_nowait(event)
        except asyncio.QueueFull:
            self.dropped.set()


class Hub:
    """Fans events out. Its thread begins with the first client and ends with close()."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._clients: set[Client] = set()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = threading.Event()
        self._started = asyncio.Event()

    @property
    def clients(self) -> int:
        return len(self._clients)

    def join(self, *, own: bool = False) -> Client | None:
        """A new client, or None when there are too many. `own`: over the unix socket. On the loop only."""
        most = CLIENTS + OWN if own else CLIENTS
        if self._closed.is_set() or len(self._clients) >= most:
            return None
        client = Client()
        self._clients.add(client)
        if self._thread is None:
            self._loop = asyncio.get_running_loop()
            self._thread = threading.Thread(
                target=self._pump, name="stallwatch-events", daemon=True
            )
            self._thread.start()
        return client

    async def started(self) -> None:
        """Returns once every later event will be offered: only then may a replay begin, or what
        happens between its end and the reader's first look would be lost.
        """
        await self._started.wait()

    def leave(self, client: Client) -> None:
        self._clients.discard(client)

    def close(self) -> None:
        """End every stream. On the loop only."""
        self._closed.set()
        for client in self._clients:
            client.offer(None)

    def join_thread(self, timeout: float) -> None:
        """Wait for the reader's thread after close(); any thread."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _pump(self) -> None:
        # Only what is new from here on: each client reads the past for itself.
        after: int | None = None
        assert self._loop is not None
        while not self._closed.is_set():
            try:
                if after is None:
                    after = self.last_id()
                    self._loop.call_soon_threadsafe(self._started.set)
                events = self._service.wait_events(after, _POLL_S)
                if events:
                    after = events[-1].id
                    self._loop.call_soon_threadsafe(self._spread, tuple(events))
            except Exception:
                if self._loop.is_closed():
                    return
                log.exception("reading events failed; trying again")
                self._closed.wait(1.0)

    def last_id(self) -> int:
        """The newest event's id, 0 when there is none."""
        after = 0
        while page := self._service.events(after=after, limit=_PAGE):
            after = page[-1].id
        return after

    def _spread(self, events: tuple[Event, ...]) -> None:
        for client in tuple(self._clients):
            for event in events:
                client.offer(event)


def frame(event: Event) -> bytes:
    """One event as SSE. The JSON is ASCII without line breaks, so that it is one data line."""
    kind = "".join(c for c in event.type if c.isalnum() or c in "-_") or "message"
    return f"id: {event.id}\nevent: {kind}\ndata: {dumps(event_json(event))}\n\n".encode()


class EventStream(Response):
    """Replays what the client missed, then follows. An ASGI response of its own, because it must be
    able to give up on a client that takes nothing, even in the middle of a send.
    """

    media_type = "text/event-stream"

    def __init__(self, hub: Hub, service: Service, *, after: int, engine: str | None) -> None:
        super().__init__(headers={"X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._hub, self._service = hub, service
        self._after, self._engine = after, engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.get("state") or {}
        client = self._hub.join(own=bool(state.get("stallwatch_unix")))
        if client is None:
            refusal = Response("too many event streams\n", 503, {"Retry-After": "5"}, "text/plain")
            await refusal(scope, receive, send)
            return
        jobs = [
            asyncio.ensure_future(self._follow(client, send)),
            asyncio.ensure_future(_gone(receive)),
            asyncio.ensure_future(client.dropped.wait()),
        ]
        try:
            await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            ended = jobs[0].done() and jobs[0].exception() is None
        finally:
            self._hub.leave(client)
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
        if ended:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            # close() would wait for the unread bytes to be taken; this client takes none
            abort: Callable[[], Any] | None = state.get("stallwatch_abort")
            if abort is not None:
                abort()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await _gone(receive)

    async def _follow(self, client: Client, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        await _send(send, b"retry: 2000\n: stallwatch events\n\n")
        await self._hub.started()
        after = await self._replay(send)
        while True:
            try:
                # not wait_for: before 3.12 it may swallow a cancellation (CPython #86296), and then
                # a stream whose client left would never end
                async with asyncio.timeout(HEARTBEAT_S):
                    event = await client.queue.get()
            except TimeoutError:
                await _send(send, b": still here\n\n")
                continue
            if event is None:
                return
            if event.id > after:
                after = event.id
                await self._show(send, event)

    async def _replay(self, send: Send) -> int:
        after = self._after
        if after and after > await run_in_threadpool(self._hub.last_id):
            after = 0  # of an earlier daemon, which began by a clock that was ahead
        while True:
            page = await run_in_threadpool(self._page, after)
            if not page:
                return after
            for event in page:
                await self._show(send, event)
            after = page[-1].id

    def _page(self, after: int) -> Sequence[Event]:
        return self._service.events(after=after, limit=_PAGE)

    async def _show(self, send: Send, event: Event) -> None:
        if self._engine in (None, event.engine):
            await _send(send, frame(event))


async def _send(send: Send, body: bytes) -> None:
    message = {"type": "http.response.body", "body": body, "more_body": True}
    async with asyncio.timeout(SEND_S):
        await send(message)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
