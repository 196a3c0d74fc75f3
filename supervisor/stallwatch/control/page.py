"""The operator's pages: rendered here, readable without a script, and read-only."""

from __future__ import annotations

from importlib.resources import files
from typing import Annotated

from fastapi import APIRouter, Path, Query
from starlette.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from stallwatch import __version__
from stallwatch.control import page_views as views
from stallwatch.control.page_live import LATEST, Frames, LiveStream
from stallwatch.control.page_markup import Html, el, join, link
from stallwatch.control.service import Event, Service
from stallwatch.control.stream import Hub
from stallwatch.errors import UnknownEngine
from stallwatch.evidence import text

# Only our own two files; no inline script or style; no string may become markup in a script.
CSP = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; "
    "require-trusted-types-for 'script'; trusted-types 'none'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
_FILES = {"page.css": "text/css", "page.js": "text/javascript"}
_MAX_PAGE = 100_000
_EVENT_PAGES = 16
_PAGE = 500

Name = Annotated[str, Path(pattern=r"^[a-z0-9-]{1,63}$")]
StallId = Annotated[str, Path(pattern=r"^st-[0-9]{8}T[0-9]{6}Z-[0-9a-f]{8}$")]


def document(title: str, body: Html, *, live: str = "") -> Response:
    """A whole page. `live`: the path of the event stream that keeps it fresh."""
    version = f"?v={__version__}"
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", f"{title} · Stallwatch"),
        el("link", rel="icon", href="data:,"),
        el("link", rel="stylesheet", href=f"/static/page.css{version}"),
        el("script", src=f"/static/page.js{version}", defer=True),
    )
    header = el(
        "header",
        link("#main", "Skip to content", class_="skip"),
        link("/", f"Stallwatch {__version__}", class_="home"),
        el(
            "nav", link("/", "Engines"), link("/stalls", "Stalls"), aria_label="Pages of Stallwatch"
        ),
        el("span", "", id="live", role="status"),
    )
    footer = el(
        "footer",
        join(
            link(path, path)
            for path in ("/healthz?verbose", "/metrics", "/v1/engines", "/openapi.json")
        ),
    )
    main = el("main", body, id="main", tabindex=-1)
    page = el("html", head, el("body", header, main, footer, data_live=live or None), lang="en")
    return HTMLResponse(f"<!doctype html>{page}\n", headers={"Content-Security-Policy": CSP})


def page_routes(service: Service, hub: Hub) -> APIRouter:
    """Every page, its two files and its event stream."""
    routes = APIRouter(include_in_schema=False)
    frames = Frames(service)
    static = {name: (files("stallwatch.control") / "static" / name).read_bytes() for name in _FILES}

    @routes.get("/")
    def overview() -> Response:
        engines = [service.engine(each.name) for each in service.engines()]
        body = views.overview(engines, service.stalls(limit=LATEST))
        return document("Engines", body, live="/live")

    @routes.get("/engines/{name}")
    def engine(name: Name) -> Response:
        body = views.engine(service.engine(name), _events_of(service, name))
        return document(name, body, live=f"/live?engine={name}")

    @routes.get("/stalls")
    def stalls(
        page: Annotated[int, Query(ge=1, le=_MAX_PAGE)] = 1,
        engine: Annotated[str | None, Query(pattern=r"^[a-z0-9-]{1,63}$")] = None,
    ) -> Response:
        size = views.STALLS_A_PAGE
        found = service.stalls(limit=size + 1, engine=engine, offset=(page - 1) * size)
        return document("Stalls", views.stalls(found, page, engine))

    @routes.get("/stalls/{stall_id}.txt")
    def stall_text(stall_id: StallId) -> Response:
        lines = text.render(service.stall(stall_id))
        return PlainTextResponse("".join(f"{line}\n" for line in lines))

    @routes.get("/stalls/{stall_id}")
    def stall(stall_id: StallId) -> Response:
        report = service.stall(stall_id)
        return document(f"{report.get('kind')} {stall_id}", views.stall(report))

    @routes.get("/live")
    async def live(
        engine: Annotated[str | None, Query(pattern=r"^[a-z0-9-]{1,63}$")] = None,
    ) -> Response:
        if engine:  # an unknown name is an answer, not a broken stream
            await run_in_threadpool(service.engine, engine)
        return LiveStream(hub, service, frames, engine or "")

    @routes.get("/static/{name}")
    def static_file(name: str) -> Response:
        if name not in static:
            raise UnknownEngine("no such file", hint="page.css and page.js are all there is")
        return Response(static[name], media_type=_FILES[name])

    return routes


def _events_of(service: Service, name: str) -> list[Event]:
    """The engine's events, oldest first, from what the ring still has."""
    found: list[Event] = []
    after = 0
    for _ in range(_EVENT_PAGES):
        page = service.events(after=after, limit=_PAGE)
        if not page:
            break
        after = page[-1].id
        found += [event for event in page if event.engine == name]
    return found
