"""The HTTP application: OpenAI's completions, chat completions and models; health and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any, NoReturn, TypeVar

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from stallwatch_engine.api import errors
from stallwatch_engine.api.answer import ModelAnswer, dumps
from stallwatch_engine.api.client import EngineClient
from stallwatch_engine.api.errors import ApiError
from stallwatch_engine.api.replies import ChatReply, CompletionReply, Reply
from stallwatch_engine.api.schemas import ChatRequest, CompletionRequest, parse
from stallwatch_engine.api.text import BadChat

MAX_BODY = 4 << 20
BODY_S = 30.0
MAX_BODIES = 64 << 20  # bytes of all bodies that are being read
LONG_TEXT = 1 << 14  # characters; tokenised beside the loop, which has streams to write

_R = TypeVar("_R", CompletionRequest, ChatRequest)


class Service:
    """The handlers, over one engine client."""

    def __init__(self, client: EngineClient, model: str) -> None:
        self._client = client
        self._model = model
        self._created = int(time.time())  # for display only
        self._bodies = Bodies()

    async def completions(self, http: Request) -> Response:
        arrived = asyncio.get_running_loop().time()
        request = await self._read(http, CompletionRequest)
        prompt = request.prompt
        ids = await self._encode(prompt) if isinstance(prompt, str) else list(prompt)
        reply = CompletionReply(self._model, logprobs=request.logprobs is not None)
        return self._answer(request, ids, reply, arrived)

    async def chat(self, http: Request) -> Response:
        arrived = asyncio.get_running_loop().time()
        request = await self._read(http, ChatRequest)
        try:
            text = self._client.codec.render([message.plain() for message in request.messages])
        except BadChat as error:
            raise errors.refused(str(error), "messages", "invalid_value") from error
        ids = await self._encode(text, special=False)  # the template writes them itself
        reply = ChatReply(self._model, logprobs=request.logprobs)
        return self._answer(request, ids, reply, arrived)

    async def models(self) -> Response:
        return _json({"object": "list", "data": [self._card()]})

    async def model(self, name: str) -> Response:
        self._check_model(name)
        return _json(self._card())

    async def health(self) -> Response:
        """200 as long as a new request would be taken or asked to come back because of load."""
        if self._client.down is not None:
            raise errors.for_new(self._client.down)
        if self._client.facts is None:
            raise errors.unavailable("engine_starting", "the engine is still starting")
        return _json({"status": "ok"})

    async def metrics(self) -> Response:
        body = generate_latest(self._client.metrics.registry)
        return Response(body, media_type=CONTENT_TYPE_LATEST)

    async def _read(self, http: Request, model: type[_R]) -> _R:
        self._client.check_open()  # who is refused anyway need not be read
        async with self._bodies.read(http) as body:
            request = parse(model, _load(body))
        self._check_model(request.model)
        self._client.check_open()
        return request

    async def _encode(self, text: str, *, special: bool = True) -> list[int]:
        encode = self._client.codec.encode
        try:
            if len(text) < LONG_TEXT:
                return encode(text, special=special)
            return await asyncio.to_thread(encode, text, special=special)
        except Exception as error:  # the library's own, for text that is no Unicode
            raise errors.refused(
                f"this prompt cannot be tokenised: {error}", "prompt", "invalid_value"
            ) from error

    def _answer(self, request: _R, ids: list[int], reply: Reply, arrived: float) -> Response:
        facts = self._client.check_open()
        room = facts.max_model_len - len(ids)
        if not ids:
            raise errors.refused("the prompt is empty", "prompt", "invalid_value")
        if max(ids) >= facts.vocab_size:
            raise errors.refused("a token outside the vocabulary", "prompt", "invalid_value")
        if room < 1 or request.new_tokens(room) > room:
            new = request.new_tokens(room) if room >= 1 else 0
            raise errors.too_long(len(ids), new, facts.max_model_len)
        exchange = self._client.submit(
            ids,
            request.sampling(room),
            request.stops(),
            arrived=arrived,
            timeout_s=request.timeout,
            streaming=request.stream,
        )
        return ModelAnswer(self._client, exchange, reply, usage=request.usage_wanted())

    def _check_model(self, name: str) -> None:
        if name != self._model:
            message = f"there is no model {name!r} here, only {self._model!r}"
            raise ApiError(404, "model_not_found", message, param="model")

    def _card(self) -> dict[str, Any]:
        facts = self._client.facts
        return {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "stallwatch",
            "max_model_len": facts.max_model_len if facts is not None else None,
        }


def create_app(client: EngineClient, model: str) -> FastAPI:
    """The application that serves `client`'s engine under the name `model`."""
    service = Service(client, model)
    app = FastAPI(title="stallwatch engine", docs_url=None, redoc_url=None, openapi_url=None)
    app.post("/v1/completions")(service.completions)
    app.post("/v1/chat/completions")(service.chat)
    app.get("/v1/models")(service.models)
    app.get("/v1/models/{name:path}")(service.model)
    app.get("/health")(service.health)
    app.get("/metrics")(service.metrics)

    @app.exception_handler(ApiError)
    async def refuse(_http: Request, error: ApiError) -> Response:
        client.metrics.refused.labels(error.code).inc()
        return _json(error.body(), error.status, error.headers())

    @app.exception_handler(HTTPException)
    async def wrong_path(http: Request, error: HTTPException) -> Response:
        message = f"{http.method} {http.url.path}: {error.detail}"
        found = ApiError(error.status_code, "not_found", message[:500])
        return _json(found.body(), found.status, dict(error.headers or {}))

    return app


def _json(
    body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(dumps(body), status, headers, "application/json")


class Bodies:
    """Reads request bodies, bounded in size and time, each and all together."""

    def __init__(self, most: int = MAX_BODIES) -> None:
        self._most = most
        self._held = 0

    @contextlib.asynccontextmanager
    async def read(self, http: Request) -> AsyncIterator[bytes]:
        """The whole body; it counts among those that are held until the context ends."""
        body = bytearray()
        try:
            try:
                async with asyncio.timeout(BODY_S):
                    async for chunk in http.stream():
                        body += chunk
                        self._held += len(chunk)
                        self._check(len(body))
            except TimeoutError:
                message = f"no whole body within {BODY_S:g} s"
                raise ApiError(408, "body_timeout", message) from None
            except ClientDisconnect:
                raise errors.disconnected() from None
            yield bytes(body)
        finally:
            self._held -= len(body)

    def _check(self, size: int) -> None:
        if size > MAX_BODY:
            raise ApiError(413, "body_too_large", f"a body of over {MAX_BODY >> 20} MiB")
        if self._held > self._most:
            raise errors.overloaded("too many large requests are being sent: try again later")


def _load(body: bytes) -> Any:
    try:
        return json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise errors.refused(f"the body is no JSON: {error}", None, "invalid_body") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
