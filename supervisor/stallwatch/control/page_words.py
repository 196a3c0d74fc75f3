"""What the page says about engines, lanes and stalls: cells of text, the same for HTML and SSE. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from stallwatch.control.order import natural
from stallwatch.control.service import EngineView, LaneView, ProcessView
from stallwatch.evidence.clean import clean
from stallwatch.lifecycle.states import State

ENGINE_HEAD = ("Engine", "State", "Ready", "For", "Restarts", "Why")
LANE_HEAD = ("Lane", "Class", "Phase", "Age", "Limit", "Used", "Details")
PROCESS_HEAD = ("Process", "Pid", "State", "Ready", "Pending", "Memory", "Command")
STALL_HEAD = ("Stall", "Engine", "Kind", "Culprit", "Action", "When")

_BAD = frozenset({State.STALLED, State.FAILED, State.EXHAUSTED, State.UNKILLABLE})
_GOOD = frozenset({State.READY})
_UNITS = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))


def age(seconds: float) -> str:
    """0.4s, 12s, 3m12s, 4d3h: two units at most; '-' for what is no age."""
    if not math.isfinite(seconds) or seconds < 0:
        return "-"
    if seconds < 10:
        return f"{seconds:.1f}s"
    left, parts = int(seconds), list[str]()
    for unit, size in _UNITS:
        count, left = divmod(left, size)
        if count or parts:
            parts.append(f"{count}{unit}" if count else "")
    return "".join(parts[:2])


def level(state: State) -> str:
    """good, bad or mild: what colours a state."""
    return "bad" if state in _BAD else "good" if state in _GOOD else "mild"


def used(lane: LaneView) -> float:
    """How much of its limit a lane has used; 0 where no limit applies (idle, pause, none set)."""
    if lane.cls in ("idle", "pause") or lane.limit_s <= 0 or not math.isfinite(lane.limit_s):
        return 0.0
    return max(0.0, lane.age_s / lane.limit_s)


def engine_cells(view: EngineView) -> list[str]:
    ready = "yes" if view.ready else "no"
    restarts = f"{view.restarts_in_window} of {view.budget}"
    why = view.exhausted_reason or view.reason
    return _clean([view.name, str(view.state), ready, age(view.age_s), restarts, why])


def lane_cells(lane: LaneView) -> list[str]:
    share = used(lane)
    limited = share > 0 or (lane.cls not in ("idle", "pause") and lane.limit_s > 0)
    return _clean(
        [
            lane.address,
            lane.cls,
            lane.phase,
            age(lane.age_s),
            age(lane.limit_s) if limited else "-",
            f"{min(share, 9.99):.0%}" if limited else "-",
            _notes(lane),
        ]
    )


def _notes(lane: LaneView) -> str:
    notes = [f"waits for {lane.wait_on}"] if lane.wait_on else []
    notes += [f"{name}={value}" for name, value in lane.details]
    notes += [lane.text] if lane.text else []
    notes += ["(torn)"] if lane.torn else []
    return " ".join(notes)


def process_cells(found: ProcessView) -> list[str]:
    attached = found.attached
    return _clean(
        [
            found.address,
            str(found.pid),
            found.state,
            ("yes" if found.ready else "no") if attached else "-",
            str(found.pending) if attached else "-",
            f"{found.rss_bytes / 2**20:.0f} MiB" if found.rss_bytes else "-",
            found.comm,
        ]
    )


def stall_cells(stall: Mapping[str, Any]) -> list[str]:
    keys = ("id", "engine", "kind")
    rest = (culprit(stall), stall.get("action"), when(stall.get("detected_at")))
    return _clean(
        [*(str(stall.get(key) or "") for key in keys), *(str(each or "-") for each in rest)]
    )


def culprit(stall: Mapping[str, Any]) -> str:
    """The culprit's address, of a summary (a string) or of a report (a table)."""
    found = stall.get("culprit")
    if isinstance(found, Mapping):
        found = found.get("lane") or found.get("process")
    return str(found or "")


def when(stamp: object) -> str:
    """2026-11-30 03:15:02Z from an RFC 3339 time."""
    text = str(stamp or "")
    return f"{text[:10]} {text[11:19]}Z" if len(text) >= 20 and text[10] == "T" else text or "-"


def nearest(lanes: Sequence[LaneView], most: int) -> list[LaneView]:
    """The `most` lanes that have used most of their limits, in the order of their addresses."""
    ranked = sorted(lanes, key=lambda lane: (-used(lane), natural(lane.address)))
    return sorted(ranked[:most], key=lambda lane: natural(lane.address))


def _clean(cells: Sequence[str]) -> list[str]:
    return [clean(cell) for cell in cells]
