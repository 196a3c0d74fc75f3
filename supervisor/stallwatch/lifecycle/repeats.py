"""The same kind and culprit again within a day: a restart does not cure it. Pure, bounded."""

from __future__ import annotations

from dataclasses import dataclass

WINDOW_NS = 86_400 * 1_000_000_000
KEPT = 256


@dataclass(frozen=True, slots=True)
class Seen:
    """One stall that was told."""

    at_ns: int
    kind: str
    culprit: str
    id: str


@dataclass(frozen=True, slots=True)
class Repeats:
    """What was told lately, oldest first. A culprit that cannot be named never repeats."""

    seen: tuple[Seen, ...] = ()

    def before(self, kind: str, culprit: str, now_ns: int) -> tuple[Seen, ...]:
        """Earlier stalls of that kind and culprit, within the window."""
        if not culprit:
            return ()
        return tuple(
            s
            for s in self.seen
            if (s.kind, s.culprit) == (kind, culprit) and now_ns - s.at_ns <= WINDOW_NS
        )

    def told(self, fresh: Seen) -> Repeats:
        """With one more; what is older than the window is forgotten."""
        kept = tuple(s for s in self.seen if fresh.at_ns - s.at_ns <= WINDOW_NS)
        return Repeats((*kept, fresh)[-KEPT:])
