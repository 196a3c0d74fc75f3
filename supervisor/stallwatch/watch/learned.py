"""Limits learnt from what phases usually take: clamp(max(3 x p99.9, 5 x longest), floor, cap).

Phases of work and of waiting only, sampled once a second; starts, idle time and pauses are never
learnt. A learnt limit ranks below explicit and configured ones and is never under the floor.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stallwatch.board.image import BoardImage, LaneClass
from stallwatch.watch.policy import S

PERIOD_NS = S
FLOOR_NS = 30 * S  # a compile in the middle of serving reports nothing for this long
CAP_NS = 300 * S  # under the engine's own deadlines: the failure must carry a name
QUANTILE, FACTOR, LONGEST_FACTOR = 0.999, 3, 5
AGE = 20_000  # samples until an age ends
ENOUGH = 1000  # samples of a phase before anything is learnt of it
MAX_PHASES = 128
MAX_NAME = 64
# Upper edges of the histogram, in ns: each 1.5 times the last, 10 ms to about half an hour.
EDGES = tuple(int(10_000_000 * 1.5**n) for n in range(30))
_LEARNT = (LaneClass.WORK, LaneClass.WAIT)


@dataclass
class Durations:
    """How long one phase took. Bounded: a histogram and the longest of this and the last age."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(EDGES) + 1))
    longest_ns: int = 0
    before_ns: int = 0  # the longest of the last age

    @property
    def longest(self) -> int:
        """Of this age and the last one, in ns."""
        return max(self.longest_ns, self.before_ns)

    @property
    def samples(self) -> int:
        return sum(self.counts)

    def add(self, took_ns: int) -> None:
        """One phase that ended."""
        self.counts[bisect_left(EDGES, took_ns)] += 1
        self.longest_ns = max(self.longest_ns, took_ns)
        if self.samples >= AGE:  # else one slow afternoon would raise the limit for good
            self.counts = [count // 2 for count in self.counts]
            self.before_ns, self.longest_ns = self.longest_ns, 0

    def limit_ns(self) -> int | None:
        """The learnt limit, None while too little is known."""
        if self.samples < ENOUGH:
            return None
        wanted, seen = QUANTILE * self.samples, 0
        high = self.longest
        for edge, count in zip(EDGES, self.counts, strict=False):
            seen += count
            if seen >= wanted:
                high = min(edge, self.longest)
                break
        return min(max(FACTOR * high, LONGEST_FACTOR * self.longest, FLOOR_NS), CAP_NS)


class Learner:
    """Watches lanes and keeps what it learnt. One thread only."""

    def __init__(self) -> None:
        self._phases: dict[str, Durations] = {}
        self._open: dict[
            int, tuple[int, str, int, int]
        ] = {}  # slot: pid, phase, entered, last seen
        self._due_ns = 0
        self._from_ns = 0  # what began before teaches nothing
        self.changed = False  # since it was last saved

    def look(self, image: BoardImage | None, now_ns: int) -> None:
        """Note which phases ended since the last look. At most once a second does anything."""
        if image is None or now_ns < self._due_ns:
            return
        self._due_ns = now_ns + PERIOD_NS
        seen: dict[int, tuple[int, str, int, int]] = {}
        for lane in image.lanes:
            if lane.closed or not lane.stack or lane.phase.cls not in _LEARNT:
                continue
            began = max(lane.phase.entered_ns, lane.phase.progress_ns)
            if began < self._from_ns:
                continue
            seen[lane.slot] = (lane.pid, lane.phase.name, began, now_ns)
        for slot, old in self._open.items():
            pid, phase, began, last = old
            if seen.get(slot, (0, "", 0, 0))[:3] != (pid, phase, began):
                # It ended between two looks; the later end is the safe one.
                self._note(phase, min(now_ns, last + PERIOD_NS) - began)
        self._open = seen

    def forget_open(self, now_ns: int) -> None:
        """Something was not as usual: what lanes are in, or were in until now, teaches nothing."""
        self._open = {}
        self._from_ns = now_ns

    def limits(self) -> Mapping[str, int]:
        """Learnt limits in ns by phase."""
        found = {name: d.limit_ns() for name, d in self._phases.items()}
        return {name: limit for name, limit in found.items() if limit is not None}

    def _note(self, phase: str, took_ns: int) -> None:
        if not phase or len(phase) > MAX_NAME or took_ns < 0:
            return
        if phase not in self._phases:
            if len(self._phases) >= MAX_PHASES:
                return
            self._phases[phase] = Durations()
        self._phases[phase].add(took_ns)
        self.changed = True

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            name: {"counts": d.counts, "longest_ns": d.longest_ns, "before_ns": d.before_ns}
            for name, d in self._phases.items()
        }

    def restore(self, saved: object) -> None:
        """Take over what an earlier daemon learnt; whatever does not look like it is left out."""
        for name, entry in saved.items() if isinstance(saved, dict) else ():
            if len(self._phases) >= MAX_PHASES or not isinstance(name, str):
                continue
            durations = _durations(entry)
            if durations is not None and 0 < len(name) <= MAX_NAME:
                self._phases[name] = durations


def _durations(entry: object) -> Durations | None:
    if not isinstance(entry, dict):
        return None
    counts, longest = entry.get("counts"), entry.get("longest_ns")
    before = entry.get("before_ns", 0)
    good = (
        isinstance(counts, list)
        and len(counts) == len(EDGES) + 1
        and all(type(n) is int and 0 <= n < 1 << 53 for n in counts)
        and all(type(ns) is int and 0 <= ns < 1 << 62 for ns in (longest, before))
    )
    return Durations(list(counts), longest, before) if good else None  # type: ignore[arg-type]  # checked above
