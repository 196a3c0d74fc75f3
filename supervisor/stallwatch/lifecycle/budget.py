"""How often an engine may be started again, and how long to wait. Pure, serialisable."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Pace:
    """The operator's choice. Durations in ns."""

    limit: int = 5  # restarts inside one window
    window_ns: int = 1800 * S
    delays_ns: tuple[int, ...] = (1 * S, 5 * S, 15 * S, 60 * S, 120 * S, 300 * S)
    cap_ns: int = 300 * S
    jitter: float = 0.2
    fruitless: int = 3  # restarts in a row without READY or a served request


@dataclass(frozen=True, slots=True)
class Budget:
    """What has been spent. `stamps` are CLOCK_MONOTONIC ns of restarts, oldest first.

    The jitter comes from `seed`, so that one state always gives one answer; whoever makes the
    budget draws the seed.
    """

    pace: Pace = Pace()
    seed: int = 0
    stamps: tuple[int, ...] = ()
    fruitless: int = 0
    total: int = 0  # restarts ever, for the jitter's draw
    not_before_ns: int = 0  # a back-off under way: no start earlier than this
    spent: str = ""  # why no restart is left; stays until reset

    def in_window(self, now_ns: int) -> int:
        """Restarts inside the window that ends now."""
        return sum(1 for at in self.stamps if at > now_ns - self.pace.window_ns)

    def refusal(self, now_ns: int) -> str:
        """Why no restart may be made now, in one sentence; '' when one may."""
        if self.spent:
            return self.spent
        if self.fruitless >= self.pace.fruitless:
            return f"{self.fruitless} restarts in a row reached neither READY nor a served request"
        used = self.in_window(now_ns)
        if used >= self.pace.limit:
            minutes = self.pace.window_ns / (60 * S)
            return f"{used} restarts within {minutes:g} min: the budget is {self.pace.limit}"
        return ""

    def delay_ns(self, now_ns: int) -> int:
        """How long to wait before the next restart: the longer, the more there were."""
        steps = self.pace.delays_ns or (0,)
        base = steps[min(self.in_window(now_ns), len(steps) - 1)]
        draw = random.Random(self.seed ^ (self.total * 0x9E3779B97F4A7C15)).random()
        return min(int(base * (1 + self.pace.jitter * draw)), self.pace.cap_ns)

    def held_until(self, at_ns: int) -> Budget:
        """A back-off was armed: not before `at_ns`, also not by a new daemon."""
        return replace(self, not_before_ns=at_ns)

    def restarted(self, now_ns: int) -> Budget:
        """One restart is being made now."""
        kept = tuple(at for at in self.stamps if at > now_ns - self.pace.window_ns)
        return replace(
            self,
            stamps=(*kept, now_ns),
            fruitless=self.fruitless + 1,
            total=self.total + 1,
            not_before_ns=0,
        )

    def progressed(self) -> Budget:
        """READY, or a request was served: the row of fruitless restarts is broken."""
        return replace(self, fruitless=0) if self.fruitless else self

    def exhausted(self, why: str) -> Budget:
        return replace(self, spent=why, not_before_ns=0)

    def reset(self) -> Budget:
        """Ten healthy minutes, or an operator: all is forgiven."""
        return replace(self, stamps=(), fruitless=0, not_before_ns=0, spent="")

    def to_dict(self, *, now_ns: int, wall: float, boot_id: str) -> dict[str, Any]:
        """JSON-ready. Monotonic stamps hold inside this boot, wall-clock ones after it."""
        return {
            "boot_id": boot_id,
            "stamps": list(self.stamps),
            "wall": [wall - (now_ns - at) / S for at in self.stamps],
            "fruitless": self.fruitless,
            "total": self.total,
            "not_before": self.not_before_ns,
            "not_before_wall": wall + max(0, self.not_before_ns - now_ns) / S,
            "spent": self.spent,
        }

    def restored(
        self, saved: Mapping[str, Any], *, now_ns: int, wall: float, boot_id: str
    ) -> Budget:
        """The same budget with what `saved` says was spent; nonsense in it is ignored, never raised.

        After a reboot monotonic time began anew, so wall time places the stamps; a wall clock
        that was set back must not push them into the future, where they would never expire.
        """
        same = saved.get("boot_id") == boot_id
        if same:
            stamps = _numbers(saved.get("stamps"))
            until = _number(saved.get("not_before"))
        else:
            stamps = [now_ns - (wall - at) * S for at in _numbers(saved.get("wall"))]
            until = now_ns + (_number(saved.get("not_before_wall")) - wall) * S
        longest = now_ns + self.pace.cap_ns
        spent = saved.get("spent")
        return replace(
            self,
            stamps=tuple(sorted(int(min(at, now_ns)) for at in stamps)),
            fruitless=max(0, int(_number(saved.get("fruitless")))),
            total=max(0, int(_number(saved.get("total")))),
            not_before_ns=int(min(until, longest)) if until > now_ns else 0,
            spent=spent if isinstance(spent, str) else "",
        )


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0
    return value if abs(value) < 1 << 63 else 0  # also refuses NaN and infinity


def _numbers(value: object) -> list[float]:
    return [_number(item) for item in value] if isinstance(value, list) else []
