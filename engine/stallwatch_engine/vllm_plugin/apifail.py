"""FAILURE to every waiting client, from inside the API process.

`Guard` is the outermost ASGI layer of vLLM's server. It knows every request that has no complete
answer yet, so when the supervisor declares a FAILURE each of them gets exactly one:

- no response started: 503 with an OpenAI error object and `x-should-retry: false`;
- an event stream: one `data: {"error": ...}` event, then the body is aborted without its final chunk
  (the openai client notices nothing in a stream that merely ends);
- any other started body: aborted.

From that moment whatever vLLM still wants to send for these requests is dropped, and new requests
get 503 with Retry-After until the process is gone. `Sentry` is the thread that watches the board.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]

RETRY_AFTER_S = 15
POLL_S = 0.05
ANSWER_S = 0.8  # the supervisor kills 1 s after the FAILURE: a client that does not read loses
CODE = "engine_stalled"
STILL_SERVED = ("/metrics",)  # an operator wants the last counters of a failed engine
# Only requests with a body to compute count as waiting: probes come and go.
COUNTED = ("POST", "PUT")


def error_object(failure: Any) -> dict[str, Any]:
    """The OpenAI error object of a failure."""
    return {
        "error": {
            "message": failure.sentence(),
            "type": CODE,
            "code": CODE,
            "param": None,
            "failure_id": failure.id,
            "kind": failure.kind,
        }
    }


class Exchange:
    """One request until its answer is complete."""

    __slots__ = ("_send", "answered", "complete", "counted", "event_stream", "started", "task")

    def __init__(self, send: Send, *, counted: bool) -> None:
        self._send = send
        self.counted = counted
        self.task = asyncio.current_task()
        self.started = self.complete = self.event_stream = self.answered = False

    async def send(self, message: Message) -> None:
        """What the application sends; nothing passes once the failure answered."""
        if self.answered:
            return
        if message["type"] == "http.response.start":
            self.started = True
            self.event_stream = any(
                name.lower() == b"content-type" and value.startswith(b"text/event-stream")
                for name, value in message.get("headers", ())
            )
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self.complete = True
        await self._send(message)

    async def fail(self, failure: Any) -> None:
        """Give the one answer. `answered` was set before, so nothing of vLLM's comes in between."""
        body = json.dumps(error_object(failure)).encode()
        if not self.started:
            await respond(self._send, body, [(b"x-should-retry", b"false")])
        elif self.event_stream:
            event = b"data: " + body + b"\n\n"
            await self._send({"type": "http.response.body", "body": event, "more_body": True})
        if self.task is not None:
            self.task.cancel()  # ends the handler; uvicorn aborts a body that is not complete


async def respond(send: Send, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    """A whole 503 answer."""
    fixed = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": fixed + headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


class Guard:
    """The outermost ASGI application of vLLM's server.

    `unfinished` says how many requests the engine still owes tokens. Before a failure it is the
    pending gauge: a client that reads slowly is no work for the engine. After a failure the gauge
    counts the answers not written yet, and the supervisor waits for it before the kill.
    """

    def __init__(
        self, app: Any, *, unfinished: Callable[[], int], pending: Callable[[int], None]
    ) -> None:
        self._app = app
        self._unfinished = unfinished
        self._pending = pending
        self._exchanges: set[Exchange] = set()
        self._answers: asyncio.Task[None] | None = None
        self.failure: Any = None
        self.answered = 0

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self.failure is not None and scope.get("path") not in STILL_SERVED:
            await self._refuse(send)
            return
        exchange = Exchange(send, counted=scope.get("method") in COUNTED)
        self._exchanges.add(exchange)
        try:
            await self._app(scope, receive, exchange.send)
        except BaseException:
            # Cancelled by us, or an application that broke when it was: the client has its answer.
            if not exchange.answered:
                raise
        finally:
            self._exchanges.discard(exchange)

    def gauge(self) -> None:
        """Publish how much is waiting; called about ten times a second by the loop's beat."""
        if self.failure is None:
            self._pending(self._unfinished())

    def fail(self, failure: Any) -> None:
        """Fail everything that waits. In the event loop; a second call does nothing."""
        if self.failure is not None:
            return
        self.failure = failure
        waiting = [exchange for exchange in self._exchanges if not exchange.complete]
        for exchange in waiting:
            exchange.answered = True
        self._pending(sum(exchange.counted for exchange in waiting))
        self._answers = asyncio.get_running_loop().create_task(self._answer(waiting, failure))

    async def _answer(self, waiting: list[Exchange], failure: Any) -> None:
        tasks = [asyncio.ensure_future(exchange.fail(failure)) for exchange in waiting]
        if tasks:
            done, _late = await asyncio.wait(tasks, timeout=ANSWER_S)
            self.answered = sum(task.exception() is None for task in done)
        # uvloop writes at the end of a turn: zero is said two turns after the last answer.
        await asyncio.sleep(0.005)
        self._pending(0)

    async def _refuse(self, send: Send) -> None:
        body = json.dumps(error_object(self.failure)).encode()
        await respond(send, body, [(b"retry-after", str(RETRY_AFTER_S).encode())])


class Sentry:
    """A thread that looks at the board every 50 ms and calls `on_failure` once.

    A thread, not a task: it must see the failure while the loop is busy, and the call into the loop
    is the only thing that has to wait for it.
    """

    def __init__(
        self,
        failure: Callable[[], Any],
        on_failure: Callable[[Any], None],
        *,
        poll_s: float = POLL_S,
    ) -> None:
        self._failure = failure
        self._on_failure = on_failure
        self._poll_s = poll_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stallwatch-sentry", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it, at most a second."""
        self._stop.set()
        self._thread.join(timeout=1)

    def _run(self) -> None:
        while not self._stop.wait(self._poll_s):
            try:
                failure = self._failure()
            except Exception:  # an unreadable board must not end the watch
                continue
            if failure is not None and failure.action != "observe":
                self._on_failure(failure)
                return
