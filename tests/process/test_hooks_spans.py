"""A span per incident, by the real SDK: in memory, and over OTLP to a receiver on loopback."""

from __future__ import annotations

import contextlib
import http.server
import threading

import pytest

from daemon_helpers import Daemon, place, toml, until
from stallwatch.hooks.notice import Notice
from stallwatch.hooks.spans import SpanHook

sdk = pytest.importorskip(
    "opentelemetry.sdk.trace", reason="OpenTelemetry's SDK is not installed (the extra `otel`)"
)
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
FAILURE = {"id": "st-1", "kind": "DEVICE_WAIT", "culprit": "worker:0/model", "action": "restart"}


def notice(event: str, second: int, engine: str = "chat", **failure: object) -> Notice:
    return Notice(
        id=f"r-{second}",
        event=event,
        engine=engine,
        at=f"2026-01-01T03:00:{second:02d}.000Z",
        message="it stands still",
        failure={**FAILURE, **failure},
    )


@pytest.fixture
def spans():
    """A hook whose spans stay in memory, and how to read the ended ones."""
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = sdk.TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    hook = SpanHook(provider)
    hook.ended = lambda: [
        (s.attributes["stallwatch.outcome"], (s.end_time - s.start_time) / 1e9, s.status.is_ok)
        for s in exporter.get_finished_spans()
    ]
    hook.kept = exporter.get_finished_spans
    yield hook
    hook.close()


def tell(hook: SpanHook, *notices: Notice) -> None:
    for each in notices:
        assert not hook.deliver(each, threading.Event()).problem


@pytest.mark.parametrize("end", ["recovered", "exhausted", "unkillable"])
def test_a_span_lasts_from_the_stall_to_its_outcome(spans, end):
    """Its times are those of the events; only a recovery is a good end."""
    tell(spans, notice("stall", 1), notice(end, 8))

    assert spans.ended() == [(end, 7.0, end == "recovered")]
    assert spans.kept()[0].attributes["stallwatch.kind"] == "DEVICE_WAIT"


def test_engines_have_spans_of_their_own_and_one_at_a_time(spans):
    """A second stall ends the first span; another engine's stays open."""
    tell(spans, notice("stall", 1), notice("stall", 2, "code"), notice("stall", 5))

    assert spans.ended() == [("superseded", 4.0, False)]


def test_an_alert_is_a_moment(spans):
    """The engine serves on: there is nothing to wait for."""
    tell(spans, notice("stall", 3, action="alert"))

    assert spans.ended() == [("alert", 0.0, False)]


def test_what_is_open_at_the_end_is_told_all_the_same(spans):
    """A daemon that stops in the middle of an incident loses no span."""
    tell(spans, notice("stall", 1))
    spans.close()

    assert [outcome for outcome, _, _ in spans.ended()] == ["daemon stopped"]


class Traced(Daemon):
    """A daemon with spans."""

    def write(self, text: str | None = None) -> None:
        engines = {self.name: self.engine_config}
        tables = {"supervisor": self.supervisor, "engines": engines, "hooks": {"spans": True}}
        self.file.write_text(toml(tables))

    def close(self) -> None:
        self.end()


class Receiver(http.server.BaseHTTPRequestHandler):
    got: list[bytes]

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        self.got.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_daemon_exports_its_incident():
    """A stall of a real engine arrives over OTLP, with its id, once the engine is ready again."""
    Receiver.got = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }
    try:
        with place() as folder:
            run = Traced(folder, env=env)
            with contextlib.closing(run):
                run.wait_ready()
                run.order("worker", "stall")
                ident = run.wait_stall()["id"]
                run.wait_ready(2)
                until(lambda: ident.encode() in b"".join(Receiver.got), what="the span")
                assert b"recovered" in b"".join(Receiver.got)
    finally:
        server.shutdown()
        server.server_close()
