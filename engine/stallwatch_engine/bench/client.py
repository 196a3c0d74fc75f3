"""One request over HTTP: sent once, read to its very end, ended in exactly one way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, Self

import aiohttp
from aiohttp.abc import AbstractStreamWriter

from stallwatch_engine.bench import timeouts
from stallwatch_engine.bench.chunk import BadAnswer, Chunk, error_of, parse_chunk, plain
from stallwatch_engine.bench.errors import TargetUnusable
from stallwatch_engine.bench.prompt import Prompt
from stallwatch_engine.bench.result import Outcome
from stallwatch_engine.bench.sse import DONE, EventStream, Oversized
from stallwatch_engine.bench.target import Target, Timeouts
from stallwatch_engine.bench.timeouts import TimeoutKind
from stallwatch_engine.bench.transcript import End, Transcript

MAX_BODY = 64 << 20  # of an answer in one piece
MAX_ERROR = 1 << 16  # of an error's body
ERROR_BODY_S = 0.2  # a status that is a timeout by itself may come without the rest of its body
_GRACE_S = 5.0  # past the client library's own total limit, should that ever not end a request
_ABORTED = ("abort", "error")  # finish reasons of an answer that the server gave up

Alarm = Callable[[TimeoutKind], None]


class _Body(aiohttp.BytesPayload):
    """A request's bytes, which leave only until the client is severed.

    The client library writes them, together with the headers, in a task of its own that cannot be
    cancelled in time: this is the last place to say no.
    """

    def __init__(self, body: bytes, severed: Callable[[], bool]) -> None:
        super().__init__(body, content_type="application/json")
        self._severed = severed

    async def write(self, writer: AbstractStreamWriter) -> None:
        self._check()
        await super().write(writer)

    async def write_with_length(
        self, writer: AbstractStreamWriter, content_length: int | None
    ) -> None:
        self._check()
        await super().write_with_length(writer, content_length)

    def _check(self) -> None:
        if self._severed():
            raise aiohttp.ClientConnectionError("not sent: the run was stopped")


class Client:
    """An HTTP session. Async context manager; `sever` may be called at any time."""

    def __init__(self, target: Target, limits: Timeouts, *, connections: int) -> None:
        self._target = target
        self._limits = limits
        self._connections = connections
        self._severed = False

    async def __aenter__(self) -> Self:
        limits = self._limits
        # Limits over `ceil_threshold` would be rounded up to whole seconds.
        given = aiohttp.ClientTimeout(
            total=limits.total,
            connect=limits.connect,
            sock_read=limits.read,
            ceil_threshold=limits.total + limits.connect + 1,
        )
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._connections),
            timeout=given,
            headers=self._target.headers,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    def sever(self) -> None:
        """Write no further request, one whose task has begun included."""
        self._severed = True

    async def ask(self, prompt: Prompt, seen: Transcript, alarm: Alarm) -> End:
        """Send one request and read its answer. `alarm` is called the moment a timeout is known as one."""
        loop = asyncio.get_running_loop()
        body = _Body(self._target.body(prompt), lambda: self._severed)
        expires = loop.time() + self._limits.total
        response: aiohttp.ClientResponse | None = None
        seen.sent(loop.time())
        try:
            async with asyncio.timeout_at(expires + _GRACE_S):
                response = await self._session.post(
                    self._target.address, data=body, allow_redirects=False
                )
                seen.status = response.status
                return await self._read(response, seen, alarm)
        except (BadAnswer, Oversized) as error:
            return End(Outcome.ERROR, str(error) or "an event too long to be one", "bad_answer")
        except (
            Exception
        ) as error:  # whatever the library raises is one request's end, not the run's
            kind = timeouts.of_exception(error, total_expired=loop.time() >= expires - 1e-3)
            if kind is None:
                return _broken(error, begun=response is not None)
            return _late(alarm, kind)
        finally:
            if response is not None:
                response.close()

    async def first_model(self) -> str:
        """The name of the first model the server lists. Raises TargetUnusable."""
        url = f"{self._target.base}/v1/models"
        try:
            async with self._session.get(url, allow_redirects=False) as response:
                raw = await _bounded(response, MAX_ERROR)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise TargetUnusable(url, _words(error)) from None
        try:
            found = json.loads(raw)["data"][0]["id"]
        except (ValueError, RecursionError, LookupError, TypeError):
            found = None
        if not isinstance(found, str):
            said = f"status {response.status} and no list of models; name one with --model"
            raise TargetUnusable(url, said)
        return found

    async def _read(self, response: aiohttp.ClientResponse, seen: Transcript, alarm: Alarm) -> End:
        if response.status != 200:
            return await _refusal(response, alarm)
        if not self._target.stream:
            chunk = parse_chunk(await _bounded(response, MAX_BODY))
            now = asyncio.get_running_loop().time()
            if chunk.error:
                return _error(chunk.error, alarm, status=200)
            seen.add(chunk, now, streamed=False)
            if chunk.finish is None:
                raise BadAnswer("an answer without a finish_reason")
            seen.done(now)
            return _ended(seen)
        if response.content_type != "text/event-stream":
            raise BadAnswer(f"{plain(response.content_type)} instead of an event stream")
        return await _stream(response, seen, alarm)


async def _stream(response: aiohttp.ClientResponse, seen: Transcript, alarm: Alarm) -> End:
    """Read on to the end of the body, past [DONE]: a body that is cut there was cut."""
    loop = asyncio.get_running_loop()
    events = EventStream()
    async for piece in response.content.iter_any():
        now = loop.time()
        for event, data in events.feed(piece):
            if data == DONE:
                seen.done(now)
                continue
            chunk = parse_chunk(data)
            if event == "error" and not chunk.error:
                chunk = Chunk(error={"message": data})
            if chunk.error:
                return _error(chunk.error, alarm, status=200)
            seen.add(chunk, now, streamed=True)
    if not seen.is_done or events.partial:
        return End(Outcome.ERROR, "the stream ended without [DONE]", "truncated")
    return _ended(seen)


def _ended(seen: Transcript) -> End:
    if seen.finish in _ABORTED:
        return End(Outcome.ERROR, f"the server ended it: {seen.finish}", "aborted")
    return End(Outcome.COMPLETED)


async def _refusal(response: aiohttp.ClientResponse, alarm: Alarm) -> End:
    """The end of a request that was answered with another status than 200."""
    kind = timeouts.of_status(response.status)
    if kind is None:
        return _error(await _error_object(response), alarm, status=response.status)
    alarm(kind)  # before the body, which may never come
    said: dict[str, Any] = {}
    with contextlib.suppress(Exception):
        async with asyncio.timeout(ERROR_BODY_S):
            said = await _error_object(response)
    return _end_of(said, Outcome.TIMED_OUT, status=response.status, kind=kind)


def _error(error: Mapping[str, Any], alarm: Alarm, *, status: int) -> End:
    """The end by an error object."""
    kind = timeouts.of_error(error)
    if kind is not None:
        alarm(kind)
    outcome = Outcome.ERROR if kind is None else Outcome.TIMED_OUT
    return _end_of(error, outcome, status=status, kind=kind)


def _end_of(
    error: Mapping[str, Any], outcome: Outcome, *, status: int, kind: TimeoutKind | None
) -> End:
    failure = error.get("failure_id")
    return End(
        outcome,
        plain(error.get("message") or f"status {status}"),
        plain(error.get("code") or error.get("type") or status),
        kind,
        plain(failure) if isinstance(failure, str) else None,
    )


def _late(alarm: Alarm, kind: TimeoutKind) -> End:
    alarm(kind)
    return End(Outcome.TIMED_OUT, f"timed out: {kind}", str(kind), kind)


def _broken(error: Exception, *, begun: bool) -> End:
    """A connection that failed: `truncated` when a part of the answer had come."""
    return End(Outcome.ERROR, _words(error), "truncated" if begun else "connection")


def _words(error: Exception) -> str:
    """Why it failed. Of a connection what the system said, not the library's view of the address."""
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno or 0
        said = os.strerror(number) if number > 0 else error.os_error.strerror  # < 0: of a resolver
        return plain(said or error)
    return plain(error) or type(error).__name__


async def _error_object(response: aiohttp.ClientResponse) -> dict[str, Any]:
    raw = await _bounded(response, MAX_ERROR)
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return {"message": plain(raw.decode("utf-8", "replace"))}
    return error_of(value) if isinstance(value, dict) else {}


async def _bounded(response: aiohttp.ClientResponse, most: int) -> bytes:
    """The whole body. Raises Oversized; an error's body is cut instead."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > most:
            if response.status != 200:
                break
            raise Oversized
    return bytes(body)
