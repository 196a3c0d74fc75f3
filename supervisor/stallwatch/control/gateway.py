"""What the gateway tells the supervisor, and what it told last."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Protocol

from fastapi import APIRouter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from stallwatch.control.numbers import Count, Duration, Moment
from stallwatch.control.views import json_response

Word = Annotated[str, Field(max_length=80)]

MOST_ENGINES = 256  # busy ones, in one report


class Silent(BaseModel):
    """An engine of which no client hears: its longest silent request."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    engine: Word
    incarnation: Count
    request: Word
    phase: Word
    since_ns: Moment
    limit_ns: Duration
    waiting: Count = 1


class GatewayReport(BaseModel):
    """All that one gateway says of itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    source: Word = ""  # which gateway
    now_ns: Moment = 0  # by its clock: another machine's differs
    in_flight: Count = 0
    waiting: Count = 0
    connections: Count = 0
    replicas: Annotated[dict[Word, Count], Field(max_length=MOST_ENGINES)] = {}
    bytes_ns: Annotated[
        dict[Word, Moment], Field(max_length=MOST_ENGINES)
    ] = {}  # sent by them last
    lost: Annotated[dict[Word, Count], Field(max_length=MOST_ENGINES)] = {}
    totals: Annotated[dict[Word, Count], Field(max_length=64)] = {}
    repeats: Annotated[dict[Word, Count], Field(max_length=8)] = {}
    failures: Annotated[dict[Word, Count], Field(max_length=64)] = {}
    silent: Annotated[list[Silent], Field(max_length=16)] = []


class Desk(Protocol):
    """Where reports go. Every method is safe from any thread and returns at once."""

    def heard(self, report: GatewayReport) -> Collection[str]:
        """The engines that serve others than the clients of this gateway."""
        ...

    def view(self) -> Mapping[str, Any]: ...


_ENDS = (
    "answered",
    "failed",
    "refused",
    "client_gone",
    "broken",
    "deadline_exceeded",
    "request_lost",
    "engine_silent",
)


class GatewayCollector(Collector):
    """The gateway's counts at scrape time, as it reported them last."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def collect(self) -> Iterator[Metric]:
        said = self._desk.view()
        totals: dict[str, int] = dict.fromkeys(_ENDS, 0) | dict(said.get("totals", {}))
        totals.pop("requests", None)  # the sum of all ends, and what is in flight
        ended = CounterMetricFamily(
            "stallwatch_gateway_requests", "Requests by how they ended.", labels=["end"]
        )
        for end, count in sorted(totals.items()):
            ended.add_metric([end], float(count))
        yield ended
        for name, text in (
            ("in_flight", "Requests at the gateway without a complete answer."),
            ("waiting", "Requests that wait for an engine."),
            ("connections", "Clients' open connections."),
        ):
            yield GaugeMetricFamily(
                f"stallwatch_gateway_{name}", text, value=float(said.get(name, 0))
            )


def gateway_routes(desk: Desk) -> APIRouter:
    """POST is the gateway's (socket or token); GET is for everybody who may read."""
    routes = APIRouter(prefix="/v1/gateway", tags=["gateway"])

    @routes.post("", summary="The gateway's report: counts, and engines that are silent")
    def heard(report: GatewayReport) -> Response:
        return json_response({"ok": True, "serving": list(desk.heard(report))})

    @routes.get("", summary="What the gateway said last")
    def view() -> Response:
        return json_response(dict(desk.view()))

    return routes
