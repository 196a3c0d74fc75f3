"""The application of `health_listen`: three probes and /metrics, nothing that names files or people.

It needs neither token nor Host check: a kubelet sends none, and there is nothing here to protect.
"""

from __future__ import annotations

from fastapi import FastAPI

from stallwatch.control import probes, problem, routes
from stallwatch.control.guard import SecurityOnly
from stallwatch.control.metrics import Metrics
from stallwatch.control.service import Service


def create_health_app(
    service: Service, *, metrics: Metrics | None = None, cache: probes.Cache | None = None
) -> FastAPI:
    """Probes say states but no reasons: a reason may hold a path."""
    app = FastAPI(title="Stallwatch health", openapi_url=None, docs_url=None, redoc_url=None)
    problem.install(app)
    app.include_router(probes.router(cache or probes.Cache(service), reasons=False))
    app.include_router(routes.metrics_routes((metrics or Metrics(service)).render))
    app.add_middleware(SecurityOnly)
    return app
