"""The report card: what was done on purpose, what was found, and whether that was right. Pure."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from stallwatch.chaos.faults import expected
from stallwatch.diagnosis.kinds import Kind
from stallwatch.evidence.clean import clean


@dataclass(frozen=True, slots=True)
class Done:
    """What was done. kinds: right names, best first; () means that anything honest is right."""

    what: str  # "gil" or a scenario's name
    kinds: tuple[str, ...]
    culprit: str  # an address, '*' and '?' as in file names; '' when anybody may be named
    seed: int = 0
    began_at: str = ""  # RFC 3339, '' when the moment is the program's own
    quiet: bool = False  # no verdict may come
    may_stay_quiet: bool = False
    action: str = ""


@dataclass(slots=True)
class Card:
    """One injection or one scenario. grade: right, unsure (no kind named, nobody wronged), wrong."""

    injected: str
    target: str
    seed: int
    expected: list[str]
    grade: str = "wrong"
    kind: str = ""
    culprit: str = ""
    confidence: str = ""
    action: str = ""
    latency_s: float | None = None  # from the injection to the confirmed finding
    over_limit_s: float | None = None  # how long after the limit it was confirmed
    report: str = ""
    summary: str = ""
    wrong: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Stable keys, in reading order."""
        return asdict(self)


def fault_done(said: Mapping[str, Any]) -> Done:
    """From the daemon's record of an injection."""
    fault, role = str(said["fault"]), str(said.get("role", ""))
    kinds = expected(fault, role)
    return Done(
        what=fault,
        kinds=tuple(map(str, kinds)),
        culprit=str(said["process"]),
        seed=int(said["seed"]),
        began_at=str(said["began_at"]),
        may_stay_quiet=not kinds,
    )


def grade(done: Done, report: Mapping[str, Any] | None) -> Card:
    """Compare; without a report nothing was found in the time that was given."""
    card = Card(done.what, done.culprit, done.seed, list(done.kinds))
    if report is None:
        if done.quiet or done.may_stay_quiet:
            card.grade = "right"
        else:
            card.wrong.append("nothing was found")
        return card
    _found(card, done, report)
    if done.quiet:
        card.wrong.append("there was nothing to find")
        return card
    named = not done.kinds or card.kind in done.kinds
    if not _accused(done, report):
        card.wrong.append(f"the culprit is {card.culprit or 'nobody'}")
    if done.action and card.action != done.action:
        card.wrong.append(f"the action is {card.action}, not {done.action}")
    if not named and card.kind != Kind.UNKNOWN_STALL:
        sure = " with high confidence" if card.confidence == "high" else ""
        card.wrong.append(f"the kind is {card.kind}{sure}")
    card.grade = "wrong" if card.wrong else "right" if named else "unsure"
    return card


def _found(card: Card, done: Done, report: Mapping[str, Any]) -> None:
    culprit = _mapping(report.get("culprit"))
    card.kind = clean(str(report.get("kind") or ""), 64)
    card.culprit = clean(str(culprit.get("lane") or culprit.get("process") or ""))
    card.confidence = clean(str(report.get("confidence", "")), 32)
    card.action = clean(str(report.get("action", "")), 32)
    card.report = clean(str(report.get("id", "")), 64)
    card.summary = clean(str(report.get("summary", "")), 600)
    card.latency_s = _between(done.began_at, str(report.get("detected_at", "")))
    limit, elapsed = report.get("limit_s"), report.get("elapsed_s")
    if isinstance(limit, int | float) and isinstance(elapsed, int | float) and limit > 0:
        card.over_limit_s = round(elapsed - limit, 3)


def _accused(done: Done, report: Mapping[str, Any]) -> bool:
    culprit = _mapping(report.get("culprit"))
    if not done.culprit:
        return True
    names = [str(culprit.get("lane") or ""), str(culprit.get("process") or "")]
    names.append(f"pid:{culprit.get('pid')}")
    return any(name and fnmatch.fnmatchcase(name, done.culprit) for name in names)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _between(before: str, after: str) -> float | None:
    try:
        took = datetime.fromisoformat(after) - datetime.fromisoformat(before)
    except (ValueError, TypeError):
        return None
    return round(took.total_seconds(), 3)


def lines(cards: Sequence[Card]) -> Iterator[str]:
    """Cards as text, within 80 columns but for the summary's own words."""
    for i, card in enumerate(cards):
        if i:
            yield ""
        yield f"injected   {card.injected}{f' into {card.target}' if card.target else ''}"
        yield f"seed       {card.seed}"
        yield f"expected   {' or '.join(card.expected) or 'nothing in particular'}"
        if card.kind:
            yield f"found      {card.kind} ({card.confidence} confidence)"
            yield f"culprit    {card.culprit or 'nobody'}"
            yield f"action     {card.action}"
        else:
            yield "found      nothing"
        yield from _latency(card)
        why = f": {'; '.join(card.wrong)}" if card.wrong else ""
        yield f"grade      {card.grade}{why}"
        if card.report:
            yield f"report     {card.report}"


def _latency(card: Card) -> Iterator[str]:
    parts = []
    if card.latency_s is not None:
        parts.append(f"{card.latency_s:.2f} s after the injection")
    if card.over_limit_s is not None:
        parts.append(f"{card.over_limit_s:.2f} s over the limit")
    if parts:
        yield f"confirmed  {', '.join(parts)}"
