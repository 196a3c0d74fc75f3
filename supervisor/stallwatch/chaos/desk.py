"""One wish for a fault, from the control plane to the process: allowed, aimed, given, recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from stallwatch.board.image import LaneClass, LaneImage
from stallwatch.chaos.faults import FAULTS, MAX_FOR_S
from stallwatch.chaos.inject import Order, inject, working
from stallwatch.chaos.target import Aim, choose
from stallwatch.clock import seconds
from stallwatch.errors import StallwatchError
from stallwatch.watch.policy import Policy
from stallwatch.watch.snapshot import Snapshot

_AFTER_S = 10.0  # a fault outlasts the limit that it is to break by this much


class Engine(Protocol):
    """What is asked of one incarnation."""

    number: int
    chaos_folder: Path | None

    def latest(self) -> Snapshot | None: ...
    def members(self) -> Mapping[int, int]: ...
    def policy(self) -> Policy: ...


@dataclass(frozen=True, slots=True)
class Wish:
    """What was asked for. on: '', 'worker:0' or 'worker:0/model'; for_s 0: as long as it takes."""

    fault: str
    on: str = ""
    seed: int = 0
    for_s: float = 0.0


def allowed(wish: Wish, engine: Engine | None, *, name: str, enabled: bool) -> Engine:
    """The engine, if this may be done to it at all. Raises StallwatchError, in words."""
    if not enabled:
        raise StallwatchError(
            "chaos is off in this daemon",
            hint="set chaos = true under [supervisor] and start it anew; never in production",
        )
    if wish.fault not in FAULTS:
        raise StallwatchError(f"no fault {wish.fault[:40]!r}", hint=f"known: {', '.join(FAULTS)}")
    if engine is None or not engine.members():
        raise StallwatchError(
            f"engine {name} has no process now", hint=f"see `stallwatch describe {name}`"
        )
    return engine


def aimed(wish: Wish, engine: Engine) -> tuple[Order, Aim]:
    """Whom it hits and for how long, by the last look. Raises StallwatchError."""
    snapshot = engine.latest()
    if snapshot is None:
        raise StallwatchError("the engine has not been looked at yet", hint="try again in a second")
    members = engine.members()
    known = {pid: working(engine.chaos_folder, f"{pid}-{ticks}") for pid, ticks in members.items()}
    aim = choose(wish.fault, wish.on, wish.seed, snapshot=snapshot, members=members, working=known)
    policy = engine.policy()
    limit_s = _limit_s(aim, snapshot, policy)
    lasting = {
        "stop": seconds(policy.stopped_ns) + _AFTER_S,
        "slow": 4 * seconds(policy.degraded_ns) + _AFTER_S,
    }
    for_s = min(wish.for_s or lasting.get(wish.fault, limit_s + _AFTER_S), MAX_FOR_S)
    # Slow enough for one step a window, and never over a limit.
    delay_s = min(limit_s / 3, 0.9 * seconds(policy.degraded_ns)) or 1.0
    return Order(wish.fault, for_s, wish.seed, delay_s), aim


def given(order: Order, aim: Aim, engine: Engine) -> tuple[int, dict[str, Any]]:
    """Do it: when it began (monotonic ns), and the record for the report card."""
    began = inject(order, aim, engine.chaos_folder)
    return began, {
        "incarnation": engine.number,
        "fault": order.fault,
        "process": aim.process,
        "role": aim.role,
        "lane": aim.lane,
        "pid": aim.pid,
        "seed": order.seed,
        "seconds": round(order.seconds, 3),
    }


def _limit_s(aim: Aim, snapshot: Snapshot, policy: Policy) -> float:
    """The limit that the fault is to break: the lane's own in a working phase, else the default."""
    lanes: tuple[LaneImage, ...] = snapshot.image.lanes if snapshot.image else ()
    own = [
        policy.limit(x.phase)
        for x in lanes
        if (x.pid, x.name) == (aim.pid, aim.lane) and x.phase.cls is LaneClass.WORK
    ]
    return seconds(max([*own, 0]) or policy.default_ns)
