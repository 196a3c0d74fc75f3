"""Write the Grafana dashboard: `python scripts/make_dashboard.py [--check]`.

The JSON in deploy/grafana is generated; `--check` fails when it is not what this file makes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parents[1] / "deploy/grafana/stallwatch.json"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24
E = 'engine=~"$engine"'  # the selection of every expression
# Healthy states are green, those that pass by themselves yellow, those that do not red.
STATES = {
    "ready": "green",
    "suspect": "green",
    "starting": "yellow",
    "backoff": "yellow",
    "draining": "blue",
    "stopping": "blue",
    "stopped": "text",
    "stalled": "red",
    "failed": "red",
    "exhausted": "dark-red",
    "unkillable": "purple",
}


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel: what it asks (expression, legend), how it is drawn, what it means."""

    title: str
    about: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"
    unit: str = "short"
    width: int = 8
    alert_above: float | None = None
    bars: bool = False


def quantile(q: str, metric: str) -> str:
    """A quantile over the range shown beside the mouse, per engine."""
    rate = f"rate(stallwatch_{metric}_bucket{{{E}}}[$__rate_interval])"
    return f"histogram_quantile({q}, sum by (engine, le) ({rate}))"


def increase(metric: str, by: str, where: str = "") -> str:
    """Events of a bar's width, by one label besides the engine."""
    return f"sum by (engine, {by}) (increase(stallwatch_{metric}{{{E}{where}}}[$__rate_interval]))"


def ages() -> tuple[tuple[str, str], ...]:
    """How long each lane has stood where it is: from its timestamp, at the moment of the query."""
    moved = f"stallwatch_lane_last_progress_timestamp_seconds{{{E}}}"
    return ((f"time() - {moved}", "{{engine}} {{lane}}"),)


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Fleet health",
        (
            Panel(
                "Engines ready",
                "Engines that can serve now, of those that are meant to.",
                (
                    (f"sum(stallwatch_engine_ready{{{E}}})", "ready"),
                    (f"sum(stallwatch_engine_wanted{{{E}}})", "wanted"),
                ),
                kind="stat",
                width=4,
            ),
            Panel(
                "Given up",
                "Engines that nothing but an operator brings back.",
                (
                    (
                        f'sum(stallwatch_engine_state{{{E}, state=~"exhausted|unkillable"}})',
                        "given up",
                    ),
                ),
                kind="stat",
                width=4,
                alert_above=1,
            ),
            Panel(
                "Loops turning",
                "0: a loop of a supervisor stands still, and its engines are not judged.",
                (("min(stallwatch_live)", "live"),),
                kind="stat",
                width=4,
            ),
            Panel(
                "State",
                "What is being done with each engine.",
                (
                    (
                        f"max by (engine, state) (stallwatch_engine_state{{{E}}}) == 1",
                        "{{engine}} {{state}}",
                    ),
                ),
                kind="state-timeline",
                width=12,
            ),
            Panel(
                "Late looks of the judging loop",
                "Share of looks that came late by over a period: verdicts are late by as much.",
                (
                    (
                        (
                            "sum by (instance) (rate(stallwatch_judge_looks_late_total[$__rate_interval]))"
                            " / sum by (instance) (rate(stallwatch_judge_looks_total[$__rate_interval]))"
                        ),
                        "{{instance}}",
                    ),
                ),
                unit="percentunit",
                alert_above=0.05,
            ),
            Panel(
                "Processes",
                "Living processes of each engine.",
                ((f"stallwatch_engine_processes{{{E}}}", "{{engine}}"),),
            ),
            Panel(
                "Limits extended",
                "Limits that were extended because the host, not the engine, stood still.",
                (
                    (
                        f"increase(stallwatch_limit_extensions_total{{{E}}}[$__rate_interval])",
                        "{{engine}}",
                    ),
                ),
                bars=True,
            ),
        ),
    ),
    (
        "Lanes and phase ages",
        (
            Panel(
                "Age of the phase",
                "Since each lane last entered a phase or progressed. An idle lane grows old without harm.",
                ages(),
                unit="s",
                width=12,
            ),
            Panel(
                "Progress",
                "Real progress per second: steps, tokens, shards.",
                (
                    (
                        f"rate(stallwatch_lane_work_total{{{E}}}[$__rate_interval])",
                        "{{engine}} {{lane}}",
                    ),
                ),
                unit="ops",
                width=12,
            ),
            Panel(
                "Pending work",
                "Work that each process says is waiting. Pending without progress is a stall.",
                ((f"stallwatch_pending{{{E}}}", "{{engine}} {{process}}"),),
                width=12,
            ),
            Panel(
                "Lanes left out",
                "Lanes beyond the limit per engine: they are judged, but not exported.",
                ((f"stallwatch_lanes_not_exported{{{E}}}", "{{engine}}"),),
                width=12,
                alert_above=1,
            ),
        ),
    ),
    (
        "Stalls by kind",
        (
            Panel(
                "Stalls",
                "Verdicts and exits that nobody asked for, by final kind.",
                ((increase("stalls_total", "kind") + " > 0", "{{engine}} {{kind}}"),),
                width=12,
                bars=True,
            ),
            Panel(
                "Again",
                "Stalls of a kind and culprit that was told within a day before.",
                ((increase("stalls_repeated_total", "kind") + " > 0", "{{engine}} {{kind}}"),),
                width=6,
                bars=True,
            ),
            Panel(
                "Withdrawn",
                "Findings withdrawn because something moved at the third look.",
                (
                    (
                        f"increase(stallwatch_stalls_withdrawn_total{{{E}}}[$__rate_interval])",
                        "{{engine}}",
                    ),
                ),
                width=6,
                bars=True,
            ),
            Panel(
                "Limit to verdict",
                "From the limit to the confirmed finding; the promise is 0.25 s.",
                (
                    (quantile("0.5", "detection_latency_seconds"), "p50 {{engine}}"),
                    (quantile("0.99", "detection_latency_seconds"), "p99 {{engine}}"),
                ),
                unit="s",
                width=24,
                alert_above=0.25,
            ),
        ),
    ),
    (
        "Restarts",
        (
            Panel(
                "Restarts",
                "By what caused them; `operator` was asked for.",
                ((increase("restarts_total", "reason") + " > 0", "{{engine}} {{reason}}"),),
                bars=True,
            ),
            Panel(
                "Budget left",
                "Restarts left in the window; at 0 the next one is EXHAUSTED.",
                ((f"stallwatch_restart_budget_remaining{{{E}}}", "{{engine}}"),),
            ),
            Panel(
                "Back-off",
                "Pause before the next start.",
                ((f"stallwatch_engine_backoff_seconds{{{E}}}", "{{engine}}"),),
                unit="s",
            ),
            Panel(
                "Incarnation",
                "Which start of the engine this is.",
                ((f"stallwatch_engine_incarnation{{{E}}}", "{{engine}}"),),
                width=12,
            ),
            Panel(
                "Processes that ended",
                "Exits of processes of each engine.",
                (
                    (
                        f"increase(stallwatch_process_exits_total{{{E}}}[$__rate_interval])",
                        "{{engine}}",
                    ),
                ),
                width=12,
                bars=True,
            ),
        ),
    ),
    (
        "Evidence",
        (
            Panel(
                "Captures by rung",
                "Processes looked at, by how far the ladder of tools got.",
                ((increase("evidence_captures_total", "rung") + " > 0", "{{engine}} {{rung}}"),),
                width=12,
                bars=True,
            ),
            Panel(
                "Share below py-spy",
                "Captures that had to do with faulthandler or /proc alone, within the range shown.",
                (
                    (
                        (
                            "sum by (engine) (increase(stallwatch_evidence_captures_total"
                            f'{{{E}, rung=~"faulthandler|proc|none"}}[$__range])) / (sum by (engine)'
                            f" (increase(stallwatch_evidence_captures_total{{{E}}}[$__range])) > 0)"
                        ),
                        "{{engine}}",
                    ),
                ),
                kind="stat",
                unit="percentunit",
                width=6,
            ),
            Panel(
                "Log lines dropped",
                "Lines of the engine that were not copied because stderr was full.",
                (
                    (
                        f"increase(stallwatch_log_lines_dropped_total{{{E}}}[$__rate_interval])",
                        "{{engine}}",
                    ),
                ),
                width=6,
                bars=True,
            ),
        ),
    ),
    (
        "Gateway",
        (
            Panel(
                "Verdict to last client answered",
                "From the confirmed finding until nobody waits any more; the promise is 2 s.",
                (
                    (quantile("0.5", "answer_latency_seconds"), "p50 {{engine}}"),
                    (quantile("0.99", "answer_latency_seconds"), "p99 {{engine}}"),
                ),
                unit="s",
                width=12,
                alert_above=2,
            ),
            Panel(
                "Requests by their end",
                "Every request ends in exactly one way: answered, or an explicit error.",
                (
                    (
                        "sum by (end) (rate(stallwatch_gateway_requests_total[$__rate_interval]))",
                        "{{end}}",
                    ),
                ),
                unit="reqps",
                width=12,
            ),
            Panel(
                "In flight and held",
                "Requests without a complete answer, and those that wait for an engine.",
                (
                    ("sum(stallwatch_gateway_in_flight)", "in flight"),
                    ("sum(stallwatch_gateway_waiting)", "held"),
                ),
                width=12,
            ),
            Panel(
                "Connections",
                "Connections of clients.",
                (("sum by (instance) (stallwatch_gateway_connections)", "{{instance}}"),),
                width=12,
            ),
        ),
    ),
)


def panels() -> Iterator[dict[str, Any]]:
    """Rows and panels, placed left to right."""
    number, top = 0, 0
    for title, row in ROWS:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "panels": [],
            "gridPos": {"x": 0, "y": top, "w": COLUMNS, "h": 1},
        }
        top, left = top + 1, 0
        for panel in row:
            if left + panel.width > COLUMNS:
                top, left = top + 8, 0
            number += 1
            yield drawn(panel, number, {"x": left, "y": top, "w": panel.width, "h": 8})
            left += panel.width
        top += 8


def drawn(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    """One panel as Grafana wants it."""
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.alert_above is not None:
        steps.append({"color": "red", "value": panel.alert_above})
    found: dict[str, Any] = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": place,
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": SOURCE,
                "expr": expr,
                "legendFormat": legend,
                "range": panel.kind != "stat",
                "instant": panel.kind == "stat",
            }
            for i, (expr, legend) in enumerate(panel.queries)
        ],
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                "thresholds": {"mode": "absolute", "steps": steps},
            },
            "overrides": [],
        },
        "options": options(panel.kind),
    }
    defaults = found["fieldConfig"]["defaults"]
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "drawStyle": "bars" if panel.bars else "line",
            "fillOpacity": 60 if panel.bars else 5,
            "showPoints": "never",
            "thresholdsStyle": {"mode": "off" if panel.alert_above is None else "dashed"},
        }
    if panel.kind == "state-timeline":
        found["fieldConfig"]["overrides"] = [
            {
                "matcher": {"id": "byRegexp", "options": f"/ {state}$/"},
                "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": color}}],
            }
            for state, color in STATES.items()
        ]
    return found


def options(kind: str) -> dict[str, Any]:
    """What Grafana's panel of that kind needs besides its fields."""
    if kind == "stat":
        return {
            "colorMode": "value",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        }
    if kind == "state-timeline":
        return {"showValue": "never", "mergeValues": True, "legend": {"showLegend": False}}
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def variables() -> list[dict[str, Any]]:
    """`datasource` and `engine`; the engines are those that the data source knows."""
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        {
            "name": "engine",
            "label": "Engine",
            "type": "query",
            "datasource": SOURCE,
            "query": {"query": "label_values(stallwatch_engine_state, engine)", "refId": "engines"},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
        },
    ]


def dashboard() -> dict[str, Any]:
    """The whole dashboard; import it, or provision the file."""
    return {
        "uid": "stallwatch",
        "title": "Stallwatch",
        "description": "Supervised LLM inference engines: health, lanes, stalls, restarts, evidence.",
        "tags": ["stallwatch", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": variables()},
        "annotations": {"list": [marks()]},
        "panels": list(panels()),
    }


def marks() -> dict[str, Any]:
    """A line through every panel where a stall was declared."""
    return {
        "name": "Stalls",
        "enable": True,
        "datasource": SOURCE,
        "expr": f"sum by (engine, kind) (increase(stallwatch_stalls_total{{{E}}}[1m])) > 0",
        "step": "1m",
        "titleFormat": "{{engine}}: {{kind}}",
        "iconColor": "red",
    }


def text() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=1) + "\n"


def main(arguments: list[str]) -> int:
    """Write the file; with --check, 1 when it is not up to date."""
    if "--check" in arguments:
        fresh = TARGET.exists() and TARGET.read_text() == text()
        if not fresh:
            print(f"{TARGET} is stale: run python scripts/make_dashboard.py", file=sys.stderr)
        return 0 if fresh else 1
    TARGET.write_text(text())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
