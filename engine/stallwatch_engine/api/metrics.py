"""The engine's own metrics, all known labels present from the start."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from stallwatch_engine.api.ledger import Source
from stallwatch_engine.wire import Stats

PREFIX = "stallwatch_engine_"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

CODES = (
    *("unsupported_parameter", "unknown_parameter", "missing_parameter", "invalid_value"),
    *("invalid_body", "body_too_large", "body_timeout", "model_not_found"),
    *("context_length_exceeded", "overloaded", "deadline_exceeded", "client_disconnected"),
    *("engine_starting", "engine_stalled", "draining", "shutdown"),
)


class Metrics:
    """One registry a process; a test makes its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.settled = self._counter("requests", "Requests by what ended them", "source")
        self.late = self._counter(
            "late_results", "Results that came after their request's end, dropped", "source"
        )
        self.refused = self._counter(
            "refused_requests", "Requests not begun, by error code", "code"
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts accepted")
        self.tokens = self._counter("generation_tokens", "Tokens received from the worker")
        self.waiting = self._gauge("requests_in_flight", "Requests without their answer")
        self.worker_up = self._gauge("worker_up", "1 while the worker serves")
        self.first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token")
        self.duration = self._histogram("request_duration_seconds", "Arrival to the answer")
        self._worker = {
            "running": self._gauge("worker_running", "Sequences being computed"),
            "waiting": self._gauge("worker_waiting", "Sequences queued in the worker"),
            "free_pages": self._gauge("kv_pages_free", "Free pages of the KV cache"),
            "total_pages": self._gauge("kv_pages", "Pages of the KV cache"),
            "steps": self._gauge("worker_steps", "Model steps since the worker's start"),
            "preemptions": self._gauge("worker_preemptions", "Preemptions since its start"),
        }
        for code in CODES:
            self.refused.labels(code)
        for source in Source:
            self.settled.labels(source.value)
            self.late.labels(source.value)

    def worker(self, stats: Stats) -> None:
        """What the worker says about itself."""
        for name, gauge in self._worker.items():
            gauge.set(getattr(stats, name))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(PREFIX + name, text, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(PREFIX + name, text, registry=self.registry, buckets=_SECONDS)
