"""Writing the one answer: whole or as an event stream, and never a half one that looks complete."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from stallwatch_engine.api.client import EngineClient
from stallwatch_engine.api.errors import ApiError
from stallwatch_engine.api.exchange import Exchange
from stallwatch_engine.api.ledger import Answer, Source
from stallwatch_engine.api.replies import Reply

ANSWER_S = 0.8  # the supervisor kills 1 s after its FAILURE: a client that does not read loses

STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would hold events back
}


class ModelAnswer(Response):
    """Follows an exchange to its end.

    An error before the first output has its HTTP status, so headers wait for that output. Later it
    is an `error` event, after which the body is aborted without its final chunk: a stream that
    merely ends looks complete to most clients.
    """

    def __init__(
        self, client: EngineClient, exchange: Exchange, reply: Reply, *, usage: bool
    ) -> None:
        self._client = client
        self._exchange = exchange
        self._reply = reply
        self._usage = usage
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(self._hang_up(receive))
        try:
            async with asyncio.timeout(None) as patience:
                self._exchange.when_settled(lambda answer: _hurry(patience, answer))
                await (self._stream(send) if self._exchange.streaming else self._whole(send))
        except TimeoutError:
            pass  # it does not read: leaving the body unfinished closes the connection
        finally:
            watch.cancel()
            self._client.written(self._exchange)

    async def _hang_up(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._client.hang_up(self._exchange)

    async def _whole(self, send: Send) -> None:
        delta, answer = await self._exchange.all()
        if answer.error is not None:
            await send_error(send, answer.error)
            return
        assert answer.finish is not None
        body = self._reply.whole(self._exchange, delta, answer.finish)
        await send_json(send, 200, body, {})

    async def _stream(self, send: Send) -> None:
        delta = await self._exchange.next()
        answer = self._exchange.answer
        if delta is None and answer is not None and answer.error is not None:
            await send_error(send, answer.error)
            return
        await send(_start(200, STREAM_HEADERS))
        for opening in self._reply.opening():
            await send(_event(opening))
        while delta is not None:
            await send(_event(self._reply.chunk(delta)))
            delta = await self._exchange.next()
        await self._end(send)

    async def _end(self, send: Send) -> None:
        answer = self._exchange.answer
        assert answer is not None
        if answer.finish is None:
            assert answer.error is not None
            await send(_event(answer.error.body()))
            return
        await send(_event(self._reply.closing(answer.finish)))
        if self._usage:
            await send(_event(self._reply.usage(self._exchange)))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


def _hurry(patience: asyncio.Timeout, answer: Answer) -> None:
    """A complete output may be read at leisure; an error is written at once or not at all."""
    if answer.source is not Source.OUTPUT:
        patience.reschedule(asyncio.get_running_loop().time() + ANSWER_S)


async def send_error(send: Send, error: ApiError) -> None:
    """A whole answer that is an error."""
    await send_json(send, error.status, error.body(), error.headers() | {"connection": "close"})


async def send_json(send: Send, status: int, body: dict[str, Any], headers: dict[str, str]) -> None:
    raw = dumps(body)
    fixed = {"content-type": "application/json", "content-length": str(len(raw))}
    await send(_start(status, fixed | headers))
    await send({"type": "http.response.body", "body": raw, "more_body": False})


def dumps(body: dict[str, Any]) -> bytes:
    """ASCII: a lone surrogate in a client's text must not break its own answer."""
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode("ascii")


def _start(status: int, headers: dict[str, str]) -> Message:
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": raw}


def _event(body: dict[str, Any]) -> Message:
    return {
        "type": "http.response.body",
        "body": b"data: " + dumps(body) + b"\n\n",
        "more_body": True,
    }
