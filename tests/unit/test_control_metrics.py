"""The exposition: names, initial zeros, bounds, nothing lost between scrapes."""

from __future__ import annotations

import math
import re

from prometheus_client.parser import text_string_to_metric_families

from stallwatch.control.metrics import MAX_LANES, Metrics
from stallwatch.control.service import Counters, LaneView
from stallwatch.diagnosis.kinds import Kind
from stallwatch.lifecycle.states import State
from stallwatch.testing.service import FakeService, engine_view

UNITS = {"ms", "milliseconds", "kb", "mb", "mib", "minutes", "hours", "percent", "age"}


def families(metrics):
    text = metrics.render()[0].decode()
    return {f.name: f for f in text_string_to_metric_families(text)}


def samples(metrics):
    return {
        (s.name, *sorted(s.labels.items())): s.value
        for family in families(metrics).values()
        for s in family.samples
    }


def test_names_follow_the_rules():
    """Prefix, help, base units, _total on counters and on nothing else, no label in a name."""
    for name, family in families(Metrics(FakeService())).items():
        assert re.fullmatch(r"stallwatch_[a-z][a-z_]*", name), name
        assert family.documentation.endswith("."), name
        assert not UNITS & set(name.split("_")), name
        assert not name.endswith(("_count", "_sum", "_bucket")), name
        for sample in family.samples:
            assert sample.name.endswith("_total") is (family.type == "counter"), sample.name
            assert not any(re.search(rf"_{label}s?_by_", name) for label in sample.labels)
            assert not sample.name.endswith("_created"), sample.name


def test_every_kind_starts_at_zero():
    """rate() sees the first stall, because its series existed before."""
    found = samples(Metrics(FakeService()))

    for kind in Kind:
        key = ("stallwatch_stalls_total", ("engine", "chat"), ("kind", str(kind)))
        assert found[key] == 0.0


def test_state_is_one_hot():
    """Exactly one state is 1, and it is the engine's."""
    service = FakeService([engine_view(state=State.BACKOFF)])
    found = families(Metrics(service))["stallwatch_engine_state"].samples

    assert {s.labels["state"]: s.value for s in found} == {
        str(state): float(state is State.BACKOFF) for state in State
    }


def test_counts_and_budget():
    """Counters carry the service's totals; the budget never goes below 0."""
    service = FakeService([engine_view(restarts_in_window=7, budget=5)])
    service.counts = Counters(
        stalls={("chat", "GIL_HELD"): 3}, restarts={("chat", "asked"): 1}, looks=10, late_looks=2
    )
    found = samples(Metrics(service))

    assert found["stallwatch_stalls_total", ("engine", "chat"), ("kind", "GIL_HELD")] == 3
    assert found["stallwatch_restarts_total", ("engine", "chat"), ("reason", "asked")] == 1
    assert found["stallwatch_restart_budget_remaining", ("engine", "chat")] == 0
    assert found["stallwatch_judge_looks_total",] == 10
    assert found["stallwatch_judge_looks_late_total",] == 2


def test_observations_survive_scrapes():
    """A latency is handed out once and stays in the histogram for every later scrape."""
    service = FakeService()
    metrics = Metrics(service)
    service.counts = Counters(detection_s=[("chat", 0.2), ("chat", 99.0), ("chat", math.nan)])

    for _ in range(2):
        found = samples(metrics)
        name, engine = "stallwatch_detection_latency_seconds", ("engine", "chat")
        assert found[f"{name}_count", engine] == 2
        assert found[f"{name}_bucket", engine, ("le", "0.2")] == 1
        assert found[f"{name}_bucket", engine, ("le", "+Inf")] == 2
        assert found[f"{name}_sum", engine] == 99.2


def test_cardinality_is_bounded():
    """A process that makes lanes without end does not fill the database, and it is said."""
    lanes = tuple(LaneView(f"w:0/{i}", "work", "p", 1.0, 0.0, 1, i, 1, 1) for i in range(1000))
    found = families(Metrics(FakeService([engine_view(lanes=lanes)])))

    assert len(found["stallwatch_lane_work"].samples) == MAX_LANES
    assert found["stallwatch_lanes_not_exported"].samples[0].value == 1000 - MAX_LANES


def test_hostile_labels_stay_one_sample():
    """A name with quotes and newlines is escaped, not a new line of the exposition."""
    lane = LaneView('a"} 1\nfake_total 2', "work", "p", 1.0, 0.0, 1, 1, 1, 1)
    found = families(Metrics(FakeService([engine_view(lanes=(lane,))])))

    assert "fake" not in found
    assert found["stallwatch_lane_work"].samples[0].labels["lane"] == 'a"} 1\nfake_total 2'


def test_openmetrics_when_asked():
    """The scraper's Accept header chooses the format."""
    body, kind = Metrics(FakeService()).render("application/openmetrics-text; version=1.0.0")

    assert "openmetrics" in kind
    assert body.endswith(b"# EOF\n")
