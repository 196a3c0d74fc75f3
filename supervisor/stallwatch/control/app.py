"""The control application: routers, errors, the gate in front."""

from __future__ import annotations

from fastapi import FastAPI

from stallwatch import __version__
from stallwatch.control import page, probes, problem, routes
from stallwatch.control.auth import Auth
from stallwatch.control.gateway import Desk, gateway_routes
from stallwatch.control.guard import Guard
from stallwatch.control.metrics import Metrics
from stallwatch.control.service import Service
from stallwatch.control.stream import Hub


def create_app(
    service: Service,
    auth: Auth,
    *,
    metrics: Metrics | None = None,
    hub: Hub | None = None,
    cache: probes.Cache | None = None,
    socket_path: str = "",
    desk: Desk | None = None,
) -> FastAPI:
    """The whole control plane over one service.

    `metrics`, `hub` and `cache` are given by a server that shares or closes them; `socket_path`
    is where it listens too, for the hint of a refusal.
    """
    metrics = metrics or Metrics(service)
    hub = hub or Hub(service)
    app = FastAPI(
        title="Stallwatch control",
        version=__version__,
        description="State, stalls, evidence and verbs of one supervisor.",
        docs_url=None,  # those pages load scripts from other machines
        redoc_url=None,
        redirect_slashes=False,  # a redirect would echo the Host header
        responses=problem.RESPONSES,
    )
    problem.install(app)
    app.include_router(probes.router(cache or probes.Cache(service), reasons=True))
    app.include_router(routes.metrics_routes(metrics.render))
    app.include_router(routes.verb_routes(service))  # before /{name}
    app.include_router(routes.engine_routes(service))
    app.include_router(routes.stall_routes(service))
    app.include_router(routes.event_routes(service, hub))
    if desk is not None:
        app.include_router(gateway_routes(desk))

    app.include_router(page.page_routes(service, hub))
    app.add_middleware(Guard, auth=auth, socket_path=socket_path)
    return app
