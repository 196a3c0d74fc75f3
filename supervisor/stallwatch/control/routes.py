"""The reads and verbs of /v1. Handlers are plain functions: they run in the bounded thread pool."""

from __future__ import annotations

import os
import re
import stat
import threading
from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.responses import PlainTextResponse, Response

from stallwatch.control.guard import who_of
from stallwatch.control.numbers import DIGITS, MOST, NUMBER, Count
from stallwatch.control.problem import problem
from stallwatch.control.service import EngineView, Event, Service
from stallwatch.control.stream import EventStream, Hub
from stallwatch.control.views import engine_json, json_response, plain
from stallwatch.errors import UnknownEngine

MAX_ARTEFACT = 64 * 1024 * 1024
STACKS_AT_ONCE = 2  # each may take 15 s of a thread, and costs its target
MAX_PAUSE_S = 24 * 3600.0

Name = Annotated[str, Path(description="the engine's name", max_length=80)]
StallId = Annotated[str, Path(description="st-20261130T031502Z- and 8 hex digits")]
_OPENMETRICS = "application/openmetrics-text"
VERBS = ("restart", "drain", "pause", "stacks", "chaos")


class _EngineName(StringConvertor):
    """What `/v1/engines/{name}` takes: no verb, whose path is another one with another method."""

    regex = rf"(?![^/]*:(?:{'|'.join(VERBS)})$)[^/]+"


register_url_convertor("engine", _EngineName())

# For the description only: the guard has let in what comes here. The socket needs no token.
_TOKEN = Depends(HTTPBearer(auto_error=False, description="token_file or STALLWATCH_TOKEN"))
_STALL_ID = re.compile(r"st-[0-9]{8}T[0-9]{6}Z-[0-9a-f]{8}")


class Pause(BaseModel):
    """A lease on an engine's limits."""

    model_config = ConfigDict(extra="forbid")
    seconds: Annotated[float, Field(gt=0, le=MAX_PAUSE_S, allow_inf_nan=False), NUMBER]


class Chaos(BaseModel):
    """A fault to inject. seconds 0: a little longer than the limit of the phase it hits."""

    model_config = ConfigDict(extra="forbid")
    fault: str = Field(max_length=32)
    on: str = Field(default="", max_length=200, description="role:rank, role:rank/lane, or ''")
    seed: Count = 0
    seconds: Annotated[float, Field(ge=0, le=3600.0, allow_inf_nan=False), NUMBER] = 0.0


class Said(BaseModel):
    """What was done."""

    engine: str
    message: str


def engine_routes(service: Service) -> APIRouter:
    """Engines: the list, one of them, its logs."""
    routes = APIRouter(prefix="/v1/engines", tags=["engines"])

    @routes.get("", summary="All engines, without lanes")
    def engines() -> Response:
        return json_response({"items": [engine_json(v, deep=False) for v in service.engines()]})

    @routes.get(
        "/{name}/logs", summary="The last lines of output (socket or token)", dependencies=[_TOKEN]
    )
    def logs(name: Name, lines: Annotated[int, Query(ge=1, le=10000), DIGITS] = 100) -> Response:
        return json_response({"items": list(service.logs(name, lines=lines))})

    @routes.get(
        "/{name:engine}",
        summary="One engine with its lanes",
        responses={200: {"model": EngineView}},
    )
    def engine(name: Name) -> Response:
        return json_response(engine_json(service.engine(name), deep=True))

    return routes


def verb_routes(service: Service) -> APIRouter:
    """What changes something or costs something. The guard lets only FULL access POST at all."""
    routes = APIRouter(prefix="/v1/engines", tags=["verbs"], dependencies=[_TOKEN])

    taking = threading.BoundedSemaphore(STACKS_AT_ONCE)

    def said(name: str, message: str) -> Response:
        return json_response({"engine": name, "message": message})

    @routes.post("/{name}:restart", response_model=Said, summary="Restart; resets EXHAUSTED")
    def restart(name: Name, request: Request) -> Response:
        return said(name, service.restart(name, who=who_of(request.scope)))

    @routes.post("/{name}:drain", response_model=Said, summary="Finish what runs, then stop")
    def drain(name: Name, request: Request) -> Response:
        return said(name, service.drain(name, who=who_of(request.scope)))

    @routes.post("/{name}:pause", response_model=Said, summary="Raise the limits for a while")
    def pause(name: Name, lease: Pause, request: Request) -> Response:
        who = who_of(request.scope)
        return said(name, service.pause(name, seconds_=lease.seconds, who=who))

    @routes.post("/{name}:chaos", summary="Inject a fault; refused unless chaos = true")
    def chaos(name: Name, order: Chaos, request: Request) -> Response:
        found = service.chaos(
            name, fault=order.fault, on=order.on, seed=order.seed, seconds_=order.seconds,
            who=who_of(request.scope),
        )  # fmt: skip
        return json_response(found)

    @routes.post("/{name}:stacks", summary="Take stacks now; takes up to 15 s")
    def stacks(name: Name, native: bool = False) -> Response:
        if not taking.acquire(blocking=False):
            return problem(
                503, "busy", f"{STACKS_AT_ONCE} requests for stacks are being answered already",
                hint="try again in a moment", headers={"Retry-After": "5"},
            )  # fmt: skip
        try:
            return json_response(service.stacks(name, native=native))
        finally:
            taking.release()

    return routes


def stall_routes(service: Service) -> APIRouter:
    """Stalls, their reports and the files kept for them."""
    routes = APIRouter(prefix="/v1/stalls", tags=["stalls"])

    @routes.get("", summary="Stalls, newest first")
    def stalls(
        limit: Annotated[int, Query(ge=1, le=1000), DIGITS] = 100,
        engine: Annotated[str | None, Query(pattern=r"^[a-z0-9-]{1,63}$")] = None,
    ) -> Response:
        return json_response({"items": list(service.stalls(limit=limit, engine=engine))})

    @routes.get("/{stall_id}", summary="The whole report")
    def stall(stall_id: StallId) -> Response:
        return json_response(service.stall(_checked(stall_id)))

    @routes.get(
        "/{stall_id}/artefacts",
        summary="Files kept for it (socket or token)",
        dependencies=[_TOKEN],
    )
    def artefacts(stall_id: StallId) -> Response:
        return json_response({"items": sorted(_artefacts(service, stall_id))})

    @routes.get(
        "/{stall_id}/artefacts/{name}",
        summary="One of those files",
        dependencies=[_TOKEN],
        response_class=Response,
        responses={200: {"content": {"application/octet-stream": {}}}},
    )
    def artefact(stall_id: StallId, name: str) -> Response:
        # only names that the service lists: no path is ever built from what a client sent
        path = _artefacts(service, stall_id).get(name)
        content = _read_regular(path) if path else None
        if content is None:
            raise UnknownEngine(f"{stall_id} has no file of that name")
        return Response(content, media_type="application/octet-stream")

    return routes


def _artefacts(service: Service, stall_id: str) -> dict[str, str]:
    return {os.path.basename(path): path for path in service.artefacts(_checked(stall_id))}


def _checked(stall_id: str) -> str:
    """The id, if it is one: nothing else ever reaches the ledger or a path."""
    if not _STALL_ID.fullmatch(stall_id):
        raise UnknownEngine("no stall of that id", hint="`stallwatch stalls` lists them")
    return stall_id


def _read_regular(path: str) -> bytes | None:
    """The content of a regular file, capped; None when it is gone or something else by now."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        return file.read(MAX_ARTEFACT)


def event_routes(service: Service, hub: Hub) -> APIRouter:
    """Events, as a list or as a stream."""
    routes = APIRouter(prefix="/v1", tags=["events"])

    @routes.get(
        "/events",
        summary="Events as SSE, or a page of them with ?follow=false",
        responses={200: {"content": {"text/event-stream": {}}}},
    )
    async def events(
        request: Request,
        *,
        after: Annotated[int | None, Query(ge=0, le=MOST), DIGITS] = None,
        engine: Annotated[str | None, Query(pattern=r"^[a-z0-9-]{1,63}$")] = None,
        follow: bool = True,
        limit: Annotated[int, Query(ge=1, le=1000), DIGITS] = 1000,
    ) -> Response:
        last = request.headers.get("last-event-id", "")
        if after is None and last:
            if not (last.isascii() and last.isdigit() and len(last) < 19 and int(last) <= MOST):
                return problem(
                    400, "bad-last-event-id", "Last-Event-ID is not a number of ours",
                    hint="send the id of an event, or leave it out", instance="/v1/events",
                )  # fmt: skip
            after = int(last)
        if follow:
            return EventStream(hub, service, after=after or 0, engine=engine)
        page = await run_in_threadpool(_page, service, after or 0, limit)
        if not page and after and after > await run_in_threadpool(hub.last_id):
            page = await run_in_threadpool(_page, service, 0, limit)  # as the stream does
        shown = [plain(event) for event in page if engine in (None, event.engine)]
        return json_response({"items": shown, "last": page[-1].id if page else after or 0})

    return routes


def _page(service: Service, after: int, limit: int) -> list[Event]:
    return list(service.events(after=after, limit=limit))


def metrics_routes(render: Callable[[str], tuple[bytes, str]]) -> APIRouter:
    routes = APIRouter(tags=["metrics"])

    @routes.get(
        "/metrics",
        summary="Prometheus metrics",
        response_class=PlainTextResponse,
        responses={200: {"content": {_OPENMETRICS: {"schema": {"type": "string"}}}}},
    )
    def metrics(request: Request) -> Response:
        body, content_type = render(request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})

    return routes
