"""What an engine does for others than the clients of our gateways, as its own lanes tell. Pure.

A request may be lost on its way behind one gateway, while the engine serves whoever asks it directly.
Its steps alone prove nothing: they may be computed for the silent request itself. They count while its
front ends have held more requests, for two seconds, than all gateways together know of.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from stallwatch.board.image import BoardImage, ProcessImage

WINDOW_NS = 2_000_000_000  # a gateway reports once a second
LOOKS = 64  # kept of that time
FRONT_ENDS = frozenset({"api", "engine"})


@dataclass(slots=True)
class Past:
    """One incarnation. `look` at each look of the judge; from its thread only."""

    incarnation: int
    served_ns: int = 0  # when it last did something for somebody else; never goes back
    _steps: int = -1
    _held: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=LOOKS))

    def look(self, image: BoardImage, now_ns: int, known: int) -> None:
        """`known`: requests of it that gateways hold."""
        self._held.append((now_ns, sum(p.pending for p in _front_ends(image))))
        steps = sum(lane.work for lane in image.lanes)
        if 0 <= self._steps < steps and self._least(now_ns) > known:
            self.served_ns = now_ns
        self._steps = steps

    def _least(self, now_ns: int) -> int:
        """What front ends held at every look of the window; 0 until it is full."""
        since = now_ns - WINDOW_NS
        full = self._held[0][0] <= since or len(self._held) == LOOKS
        return min(held for at, held in self._held if at >= since) if full else 0


def _front_ends(image: BoardImage) -> list[ProcessImage]:
    """An engine whose roles are its own has no front end that we know: then all of them."""
    attached = [p for p in image.processes if not p.detached]
    return [p for p in attached if p.role in FRONT_ENDS] or attached
