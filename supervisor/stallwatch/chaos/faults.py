"""The faults, as data: what each does, who can do it, and what a good diagnosis calls it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stallwatch.diagnosis.kinds import Kind

ENV = "STALLWATCH_CHAOS"  # read by stallwatch.heartbeat.chaos inside the engine
FOLDER = "chaos"  # inside the incarnation's run folder
MAX_FOR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `inside`: the process does it itself, at a mark of its own lane."""

    what: str
    inside: bool
    kinds: tuple[Kind, ...]  # right names, best first; empty: what follows is up to the engine


FAULTS: Mapping[str, Fault] = {
    "stop": Fault("SIGSTOP; SIGCONT at its end", False, (Kind.PROCESS_STOPPED,)),
    "kill": Fault("SIGKILL", False, (Kind.CHILD_DIED,)),
    "gil": Fault("sleep in C with the GIL held", True, (Kind.GIL_HELD,)),
    "spin": Fault("compute without end in the lane's thread", True, (Kind.CPU_RUNAWAY,)),
    "block": Fault("sleep in C with the GIL free", True, (Kind.DEVICE_WAIT,)),
    "slow": Fault("sleep at every working mark of the lane", True, (Kind.DEGRADED,)),
    "leak-fd": Fault("open files up to the limit, and keep them", True, ()),
    "fill-pipe": Fault("write to a pipe that nobody reads", True, (Kind.OUTPUT_BLOCKED,)),
}
# A front end whose loop stands is told as that, whatever holds it.
_ON_LOOP = frozenset({"spin", "block", "fill-pipe"})


def expected(fault: str, role: str) -> tuple[Kind, ...]:
    """What a right diagnosis may call this fault in a process of that role; () for anything."""
    kinds = FAULTS[fault].kinds
    if role == "api" and fault == "block":
        return (Kind.FRONTEND_BLOCKED,)  # a loop waits for no device
    return (*kinds, Kind.FRONTEND_BLOCKED) if role == "api" and fault in _ON_LOOP else kinds
