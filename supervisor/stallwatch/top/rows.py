"""What the daemon's JSON says, as rows of plain, cleaned text and finite numbers.

A daemon of another version, or something else behind the URL, may leave anything out: a value
that is not of the expected type counts as absent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stallwatch.cli.output import clean
from stallwatch.control.order import natural

MAX_WORDS = 300  # no field is shown longer than a terminal is wide


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One engine. Ages in seconds."""

    name: str
    state: str
    incarnation: int
    restarts: str  # "used/budget"
    age_s: float
    last_stall: str
    reason: str


@dataclass(frozen=True, slots=True)
class LaneRow:
    """One lane. limit_s is 0 when the phase has none."""

    address: str
    cls: str
    phase: str
    age_s: float
    limit_s: float
    notes: str

    @property
    def used(self) -> float:
        """The part of the limit that is spent; 0 without a limit."""
        return self.age_s / self.limit_s if self.limit_s > 0 else 0.0

    def matches(self, words: str) -> bool:
        """Every word of the filter stands somewhere in the lane's address, class or phase."""
        said = f"{self.address} {self.cls} {self.phase}".lower()
        return all(word in said for word in words.lower().split())


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """One process of an engine."""

    address: str
    pid: int
    state: str
    pending: int
    rss_bytes: int
    comm: str


@dataclass(frozen=True, slots=True)
class StallRow:
    """One stall of the ledger."""

    id: str
    engine: str
    kind: str
    detected_at: str  # RFC 3339
    culprit: str


@dataclass(frozen=True, slots=True)
class Detail:
    """One engine looked at alone. fields: what `describe` says, in its order."""

    name: str = ""
    fields: tuple[tuple[str, str], ...] = ()
    processes: tuple[ProcessRow, ...] = ()
    lanes: tuple[LaneRow, ...] = ()


@dataclass(frozen=True, slots=True)
class Picture:
    """Everything one look at the daemon brought."""

    engines: tuple[EngineRow, ...] = ()
    detail: Detail = Detail()
    stalls: tuple[StallRow, ...] = ()

    def engine(self, name: str) -> EngineRow | None:
        return next((each for each in self.engines if each.name == name), None)


def words(value: object) -> str:
    """Cleaned text of bounded length; '' for what is no text or number."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    return clean(str(value)[:MAX_WORDS])


def number(value: object) -> float:
    """A finite number, not negative; 0 for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    return float(value) if 0 <= value <= 2**63 and math.isfinite(value) else 0.0


def items(value: object) -> list[dict[str, Any]]:
    """The objects of a list, or of an answer's "items"."""
    listed = value.get("items") if isinstance(value, dict) else value
    return [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []


def engine_rows(answer: object) -> tuple[EngineRow, ...]:
    """Rows of GET /v1/engines, those without a name left out."""
    return tuple(
        EngineRow(
            name=words(each.get("name")),
            state=words(each.get("state")),
            incarnation=int(number(each.get("incarnation"))),
            restarts=f"{number(each.get('restarts_in_window')):.0f}/{number(each.get('budget')):.0f}",
            age_s=number(each.get("age_s")),
            last_stall=words(each.get("last_stall")).rpartition("-")[2],
            reason=words(each.get("exhausted_reason")) or words(each.get("reason")),
        )
        for each in items(answer)
        if words(each.get("name"))
    )


def lane_rows(answer: object) -> tuple[LaneRow, ...]:
    """Lanes of an engine, the one nearest to its limit first."""
    rows = [
        LaneRow(
            address=words(each.get("address")),
            cls=words(each.get("cls")),
            phase=words(each.get("phase")),
            age_s=number(each.get("age_s")),
            limit_s=number(each.get("limit_s")),
            notes=_notes(each),
        )
        for each in items(answer)
    ]
    # Sorted by tenths: a table whose rows change places at every look cannot be read.
    return tuple(
        sorted(rows, key=lambda r: (-math.floor(10 * min(r.used, 99)), natural(r.address)))
    )


def _notes(lane: dict[str, Any]) -> str:
    waits = words(lane.get("wait_on"))
    given = lane.get("details")
    details = given if isinstance(given, dict) else {}
    said = [f"waits for {waits}"] if waits else []
    said += [f"{words(key)}={words(value)}" for key, value in list(details.items())[:8]]
    said += ["(torn)"] if lane.get("torn") is True else []
    return " ".join(said)


def process_rows(answer: object) -> tuple[ProcessRow, ...]:
    """Processes of an engine in the daemon's order."""
    return tuple(
        ProcessRow(
            address=words(each.get("address")),
            pid=int(number(each.get("pid"))),
            state=words(each.get("state")),
            pending=int(number(each.get("pending"))),
            rss_bytes=int(number(each.get("rss_bytes"))),
            comm=words(each.get("comm")),
        )
        for each in items(answer)
    )


def stall_rows(answer: object) -> tuple[StallRow, ...]:
    """Rows of GET /v1/stalls, newest first as they come."""
    return tuple(
        StallRow(
            id=words(each.get("id")),
            engine=words(each.get("engine")),
            kind=words(each.get("kind")),
            detected_at=words(each.get("detected_at")),
            culprit=_culprit(each.get("culprit")),
        )
        for each in items(answer)
    )


def _culprit(value: object) -> str:
    if isinstance(value, dict):
        return words(value.get("lane")) or words(value.get("process"))
    return words(value)


def detail(answer: object) -> Detail:
    """GET /v1/engines/{name}."""
    found = answer if isinstance(answer, dict) else {}
    command = found.get("command")
    said: Sequence[object] = command if isinstance(command, list) else ()
    shown = [
        ("State", found.get("state")),
        ("Why", found.get("exhausted_reason") or found.get("reason")),
        ("Command", " ".join(words(each) for each in said[:100])),
        ("Incarnation", found.get("incarnation")),
        ("Started", found.get("started_at")),
        ("Ready since", found.get("ready_at")),
        ("Root pid", found.get("root_pid")),
        ("Port", found.get("port")),
        ("Enforce", found.get("enforce")),
        ("Last stall", found.get("last_stall")),
        ("Top frame", found.get("top_frame")),
    ]
    return Detail(
        name=words(found.get("name")),
        fields=tuple((key, words(value)) for key, value in shown if words(value)),
        processes=process_rows(found.get("processes")),
        lanes=lane_rows(found.get("lanes")),
    )
