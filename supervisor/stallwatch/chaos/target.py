"""Whom a fault is given to: the named lane or process, or one that the seed picks. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from stallwatch.board.image import LaneImage, ProcessImage
from stallwatch.chaos.faults import FAULTS
from stallwatch.errors import StallwatchError, UnknownEngine
from stallwatch.watch.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Aim:
    """One process, by pid and start, and for a fault from inside one of its lanes."""

    pid: int
    start_ticks: int
    process: str  # "worker:0", or "pid:123" for a member that never attached
    role: str = ""
    lane: str = ""  # the lane's own name; '' for a fault of the whole process

    @property
    def address(self) -> str:
        return f"{self.process}/{self.lane}" if self.lane else self.process


def choose(
    fault: str,
    on: str,
    seed: int,
    *,
    snapshot: Snapshot,
    members: Mapping[int, int],
    working: Mapping[int, frozenset[str]] = MappingProxyType({}),
) -> Aim:
    """The target. `working`: lanes known to enter working phases, by pid.

    Raises StallwatchError with the sentence that says why there is none.
    """
    image = snapshot.image
    attached = {
        p.pid: p
        for p in (image.processes if image else ())
        if members.get(p.pid) == p.start_ticks and not p.detached
    }
    if FAULTS[fault].inside:
        lanes = [x for x in (image.lanes if image else ()) if x.pid in attached and not x.closed]
        return _lane(fault, on, seed, lanes=lanes, attached=attached, working=working)
    everyone = [
        Aim(pid, ticks, attached[pid].address, attached[pid].role)
        if pid in attached
        else Aim(pid, ticks, f"pid:{pid}")
        for pid, ticks in members.items()
    ]
    process = on.partition("/")[0]
    found = [a for a in everyone if process in ("", a.process, f"pid:{a.pid}")]
    if not found:
        known = ", ".join(sorted(a.process for a in everyone)) or "none"
        raise _nobody(f"no process {process!r} in this engine", known, named=on)
    if not on:  # workers first: an engine is more than its front end
        found = [a for a in found if a.role not in ("", "api", "engine")] or found
    return random.Random(seed).choice(sorted(found, key=lambda a: a.address))


def _nobody(sentence: str, known: str, *, named: str) -> StallwatchError:
    """A name that nothing has is the same mistake as an engine's; where none was named it is none."""
    kind = UnknownEngine if named else StallwatchError
    return kind(sentence, hint=f"known: {known}")


def _lane(
    fault: str,
    on: str,
    seed: int,
    *,
    lanes: list[LaneImage],
    attached: Mapping[int, ProcessImage],
    working: Mapping[int, frozenset[str]],
) -> Aim:
    if not attached:
        raise StallwatchError(
            f"{fault} happens inside a process, and none of this engine has attached a lane",
            hint="only stop and kill can be injected into an engine without heartbeats",
        )
    process, _, name = on.partition("/")
    found = [
        x
        for x in lanes
        if process in ("", attached[x.pid].address, f"pid:{x.pid}")
        and name in ("", x.name)
        and not x.channel
    ]
    if not found:
        known = ", ".join(sorted(x.address for x in lanes if not x.channel)[:12]) or "none"
        raise _nobody(f"no lane {on!r} in this engine", known, named=on)
    if not process:
        found = [x for x in found if x.role not in ("api", "engine")] or found
    # A lane that enters no working phase takes no order; of an engine that does not say, work counts.
    enters = [x for x in found if x.name in working.get(x.pid, ())]
    found = enters or [x for x in found if x.work > 0] or found
    lane = random.Random(seed).choice(sorted(found, key=lambda x: x.address))
    who = attached[lane.pid]
    return Aim(lane.pid, who.start_ticks, who.address, who.role, lane.name)
