"""One OpenTelemetry span per incident, from its declaration to the recovery. Needs the extra `otel`.

Where spans go, and under which service name, is said by OpenTelemetry's own variables (OTEL_*).
"""

from __future__ import annotations

import threading
from datetime import datetime
from importlib import import_module
from typing import Any

from stallwatch import __version__
from stallwatch.errors import ConfigError
from stallwatch.hooks.notice import Notice
from stallwatch.hooks.worker import Outcome

_NAME = "stallwatch.incident"
_FLUSH_S = 3.0
# Keys of a FAILURE as attributes; all are bounded and redacted before they come here.
_KEYS = ("id", "incarnation", "kind", "culprit", "phase", "elapsed_s", "limit_s", "action")


class SpanHook:
    """Opens a span at `stall`; ends it at `recovered`, `exhausted` or `unkillable`.

    At most one is open per engine: a further stall ends the one before. All calls but `close` come
    from the hook's own thread; export is the SDK's, in a thread of the SDK.
    """

    def __init__(self, provider: Any = None) -> None:
        self._provider = provider if provider is not None else _provider()
        self._tracer = self._provider.get_tracer("stallwatch", __version__)
        self._open: dict[str, Any] = {}  # by engine: as many as are configured

    def deliver(self, notice: Notice, abort: threading.Event) -> Outcome:
        """Never waits: the SDK queues what is ended, and drops what its queue cannot take."""
        at = _nanoseconds(notice.at)
        if notice.event == "stall":
            self._end(notice.engine, at, "superseded", ok=False)
            self._begin(notice, at)
        else:
            self._end(notice.engine, at, notice.event, ok=notice.event == "recovered")
        return Outcome()

    def close(self) -> None:
        """End what is open and hand it out, for at most a few seconds. After the hook's thread."""
        for engine in list(self._open):
            self._end(engine, None, "daemon stopped", ok=False)
        # an exporter whose receiver hangs has deadlines of its own, which are longer than ours
        flush = threading.Thread(target=self._provider.shutdown, name="otel-flush", daemon=True)
        flush.start()
        flush.join(_FLUSH_S)

    def _begin(self, notice: Notice, at: int) -> None:
        failure = notice.failure
        attributes = {f"stallwatch.{key}": failure[key] for key in _KEYS if key in failure}
        attributes |= {"stallwatch.engine": notice.engine, "stallwatch.summary": notice.message}
        span = self._tracer.start_span(_NAME, start_time=at, attributes=attributes)
        self._open[notice.engine] = span
        if failure.get("action") == "alert":  # the engine serves on: nothing to recover from
            self._end(notice.engine, at, "alert", ok=False)

    def _end(self, engine: str, at: int | None, outcome: str, *, ok: bool) -> None:
        from opentelemetry.trace import Status, StatusCode  # noqa: PLC0415

        span = self._open.pop(engine, None)
        if span is None:
            return
        span.set_attribute("stallwatch.outcome", outcome)
        span.set_status(Status(StatusCode.OK) if ok else Status(StatusCode.ERROR, outcome))
        span.end(end_time=at)


def _provider() -> Any:
    """The SDK's, exporting over OTLP. ConfigError when the extra is not installed."""
    try:
        otlp = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        export = import_module("opentelemetry.sdk.trace.export")
        resources = import_module("opentelemetry.sdk.resources")
        trace = import_module("opentelemetry.sdk.trace")
    except ImportError as error:
        raise ConfigError(
            f"[hooks] spans needs OpenTelemetry's SDK: {error}",
            hint="pip install 'stallwatch[otel]', or leave `spans` out",
        ) from None
    named = resources.Resource({resources.SERVICE_NAME: "stallwatch"})
    provider = trace.TracerProvider(
        resource=named.merge(resources.Resource.create()), shutdown_on_exit=False
    )
    provider.add_span_processor(export.BatchSpanProcessor(otlp.OTLPSpanExporter()))
    return provider


def _nanoseconds(stamp: str) -> int:
    return int(datetime.fromisoformat(stamp).timestamp() * 1e9)
