"""Prometheus metrics, read from the service at scrape time: timestamps, not ages; base units."""

from __future__ import annotations

import platform
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import prometheus_client
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from stallwatch import __version__
from stallwatch.control.service import Counters, EngineView, Service
from stallwatch.diagnosis.kinds import Kind
from stallwatch.evidence.model import Rung
from stallwatch.lifecycle.states import State

MAX_LANES = 256  # per engine: a program that makes lanes without end must not fill a database
DETECTION_BUCKETS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0)
ANSWER_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)

_KINDS = tuple(str(kind) for kind in Kind)
_RUNGS = tuple(str(rung) for rung in Rung)


class _Histogram:
    """Observations kept between scrapes, per engine."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name, self._text, self._bounds = name, text, tuple(bounds)
        self._counts: dict[str, list[int]] = defaultdict(lambda: [0] * (len(bounds) + 1))
        self._sums: dict[str, float] = defaultdict(float)

    def observe(self, engine: str, value: float) -> None:
        if not 0.0 <= value < float("inf"):  # NaN included: a sum with one is lost for ever
            return
        place = next((i for i, b in enumerate(self._bounds) if value <= b), len(self._bounds))
        self._counts[engine][place] += 1
        self._sums[engine] += value

    def family(self, engines: Iterable[str]) -> Metric:
        family = HistogramMetricFamily(self._name, self._text, labels=["engine"])
        for engine in sorted({*engines, *self._counts}):
            total, buckets = 0, []
            for bound, count in zip(
                (*map(str, self._bounds), "+Inf"), self._counts[engine], strict=True
            ):
                total += count
                buckets.append((bound, total))
            family.add_metric([engine], buckets, self._sums[engine])
        return family


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"stallwatch_{name}", text, labels=labels)


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"stallwatch_{name}", text, labels=labels)


def _engine_families(engines: Sequence[EngineView]) -> Iterator[Metric]:
    state = _gauge("engine_state", "1 for the state the engine is in.", "engine", "state")
    facts = {
        "wanted": _gauge("engine_wanted", "1 when the engine is meant to run.", "engine"),
        "up": _gauge("engine_up", "1 while a process of the engine exists.", "engine"),
        "ready": _gauge("engine_ready", "1 while the engine can serve.", "engine"),
        "incarnation": _gauge("engine_incarnation", "Which start of the engine this is.", "engine"),
        "members": _gauge("engine_processes", "Living processes of the engine.", "engine"),
        "backoff_s": _gauge("engine_backoff_seconds", "Pause before the next start.", "engine"),
    }
    budget = _gauge(
        "restart_budget_remaining", "Restarts left in the window before EXHAUSTED.", "engine"
    )
    for view in engines:
        for each in State:
            state.add_metric([view.name, str(each)], float(view.state is each))
        for field, family in facts.items():
            family.add_metric([view.name], float(getattr(view, field)))
        budget.add_metric([view.name], float(max(0, view.budget - view.restarts_in_window)))
    yield from (state, *facts.values(), budget)


def _lane_families(engines: Sequence[EngineView], now: float) -> Iterator[Metric]:
    moved = _gauge(
        "lane_last_progress_timestamp_seconds",
        "When the lane last entered a phase or progressed, in seconds since the epoch.",
        "engine",
        "lane",
    )
    work = _counter(
        "lane_work", "Real progress of the lane: steps, tokens, shards.", "engine", "lane"
    )
    left_out = _gauge("lanes_not_exported", "Lanes beyond the limit per engine.", "engine")
    pending = _gauge("pending", "Work that a process says is waiting.", "engine", "process")
    for view in engines:
        seen: set[str] = set()
        for lane in view.lanes:
            if lane.address in seen or len(seen) >= MAX_LANES:
                continue
            seen.add(lane.address)
            moved.add_metric([view.name, lane.address], round(now - lane.age_s, 1))
            work.add_metric([view.name, lane.address], float(lane.work))
        left_out.add_metric([view.name], float(max(0, len(view.lanes) - MAX_LANES)))
        waiting: dict[str, int] = defaultdict(int)
        for process in [p for p in view.processes if p.attached][:MAX_LANES]:
            waiting[process.address] += process.pending
        for address, count in waiting.items():
            pending.add_metric([view.name, address], float(count))
    yield from (moved, work, left_out, pending)


def _by_two(
    family: CounterMetricFamily,
    counts: dict[tuple[str, str], int],
    engines: Iterable[str],
    known: Iterable[str],
) -> Metric:
    """All known label pairs start at 0, so that rate() sees the first event."""
    pairs = {(engine, word): 0 for engine in engines for word in known}
    pairs.update({(engine, str(word)): n for (engine, word), n in counts.items()})
    for (engine, word), n in sorted(pairs.items()):
        family.add_metric([engine, word], float(n))
    return family


def _by_one(family: CounterMetricFamily, counts: dict[str, int], engines: Iterable[str]) -> Metric:
    for engine in sorted({*engines, *counts}):
        family.add_metric([engine], float(counts.get(engine, 0)))
    return family


def _counter_families(counters: Counters, names: Sequence[str]) -> Iterator[Metric]:
    stalls = _counter("stalls", "Confirmed stalls and unasked exits.", "engine", "kind")
    yield _by_two(stalls, counters.stalls, names, _KINDS)
    repeated = _counter(
        "stalls_repeated",
        "Stalls of a kind and culprit told within a day before.",
        "engine",
        "kind",
    )
    yield _by_two(repeated, counters.repeated, names, _KINDS)
    restarts = _counter("restarts", "Restarts, by what caused them.", "engine", "reason")
    yield _by_two(restarts, counters.restarts, names, _KINDS)
    captures = _counter("evidence_captures", "Processes looked at, by rung.", "engine", "rung")
    yield _by_two(captures, counters.captures, names, _RUNGS)
    for name, text, counts in (
        ("stalls_withdrawn", "Findings withdrawn because something moved.", counters.withdrawn),
        ("process_exits", "Processes of the engine that ended.", counters.exits),
        (
            "log_lines_dropped",
            "Engine log lines not copied: stderr was full.",
            counters.log_dropped,
        ),
        ("limit_extensions", "Limits extended because of the host.", counters.extensions),
    ):
        yield _by_one(_counter(name, text, "engine"), counts, names)
    yield CounterMetricFamily(
        "stallwatch_judge_looks", "Looks of the judging loop.", value=counters.looks
    )
    yield CounterMetricFamily(
        "stallwatch_judge_looks_late", "Looks late by over a period.", value=counters.late_looks
    )


class ServiceCollector(Collector):
    """One scrape, one reading of the service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = threading.Lock()  # counters() hands each observation out once
        self._detection = _Histogram(
            "stallwatch_detection_latency_seconds",
            "From the limit to the confirmed finding, of each stall and unasked exit.",
            DETECTION_BUCKETS,
        )
        self._answer = _Histogram(
            "stallwatch_answer_latency_seconds",
            "From the confirmed finding to the last waiting client answered.",
            ANSWER_BUCKETS,
        )

    def collect(self) -> Iterator[Metric]:
        started = time.perf_counter()
        info = {"version": __version__, "python": platform.python_version()}
        yield InfoMetricFamily("stallwatch_build", "What is running.", value=info)
        views = [self._service.engine(view.name) for view in self._service.engines()]
        names = [view.name for view in views]
        yield from _engine_families(views)
        yield from _lane_families(views, time.time())
        with self._lock:
            counters = self._service.counters()
            for engine, value in counters.detection_s:
                self._detection.observe(engine, value)
            for engine, value in counters.answer_s:
                self._answer.observe(engine, value)
            histograms = (self._detection.family(names), self._answer.family(names))
        yield from _counter_families(counters, names)
        yield from histograms
        live = float(self._service.liveness().live)
        yield GaugeMetricFamily("stallwatch_live", "1 while our own loops turn.", value=live)
        yield GaugeMetricFamily(
            "stallwatch_collector_duration_seconds",
            "How long this scrape took to read the service.",
            value=time.perf_counter() - started,
        )


class Metrics:
    """The registry of one daemon. Both HTTP addresses share it."""

    def __init__(self, service: Service) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(ServiceCollector(service))

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The exposition and its content type, in the format the scraper asked for."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self.registry), content_type
