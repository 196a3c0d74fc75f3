"""Faults on purpose, for tests. Nothing here does anything unless STALLWATCH_TEST_FAULTS=1.

STALLWATCH_FAULTS holds them, comma separated: `NAME[@SEQ][=MILLISECONDS]`, where SEQ is the step that is
hit (without it: every step). The names are the keys of NAMES. A list of faults without the switch is
refused: a variable left over in a deployment must not break an engine, nor be ignored in silence.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

SWITCH = "STALLWATCH_TEST_FAULTS"
VARIABLE = "STALLWATCH_FAULTS"

NAMES = {
    "event.never": "a recorded event never completes; @NAME picks the event by name",
    "event.late": "it completes later by =MILLISECONDS",
    "event.wrong": "it says complete before the work before it ran",
    "offload.kill": "the offload process kills itself when the request arrives",
    "offload.stop": "it stops itself (state T)",
    "offload.slow": "it takes =MILLISECONDS longer",
    "offload.duplicate": "it publishes a step twice",
    "offload.out_of_order": "it publishes the next step's number",
    "offload.kill_before_ready": "it kills itself between its stores and the ready message",
    "offload.double_request": "the worker sends one request twice",
    "inputs.shared_event": "one input event for all requests: the old mode, which deadlocks",
    "worker.crash": "the worker kills itself when it is to launch the step",
    "worker.hold_gil": "its model thread holds the GIL for =MILLISECONDS",
}
_FORM = re.compile(r"(?P<name>[a-z_.]+)(@(?P<at>[A-Za-z0-9_-]+))?(=(?P<ms>\d+(\.\d+)?))?")


class FaultsRefused(ValueError):
    """The operator must remove the variable, or set the switch in a test."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `at` is a step number or an event's name, empty for all."""

    name: str
    at: str = ""
    milliseconds: float = 0.0

    @property
    def seconds(self) -> float:
        return self.milliseconds / 1e3


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults of this process; empty in production."""

    items: tuple[Fault, ...] = ()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Faults:
        """What the variable asks for. FaultsRefused without the switch or for an unknown fault."""
        text = environment.get(VARIABLE, "")
        if not text:
            return cls()
        if environment.get(SWITCH) != "1":
            raise FaultsRefused(
                f"{VARIABLE} is for tests: unset it, or set {SWITCH}=1 in a test that wants it"
            )
        return cls(tuple(parse(item) for item in text.split(",")))

    def hit(self, name: str, at: int | str = "") -> Fault | None:
        """The fault of that name that applies here, or None."""
        for item in self.items:
            if item.name == name and item.at in {"", str(at)}:
                return item
        return None

    def event(self, name: str) -> str:
        """How the event of that name misbehaves when recorded: never, late, wrong; empty for not at all."""
        for how in ("never", "late", "wrong"):
            if self.hit(f"event.{how}", name):
                return how
        return ""

    @property
    def late_s(self) -> float:
        """Seconds by which late events are late."""
        return sum(item.seconds for item in self.items if item.name == "event.late")


def parse(text: str) -> Fault:
    """One fault from its text; FaultsRefused names what is known."""
    found = _FORM.fullmatch(text.strip())
    if found is None or found["name"] not in NAMES:
        raise FaultsRefused(f"{VARIABLE}: {text!r} is no fault; known: {', '.join(NAMES)}")
    return Fault(found["name"], found["at"] or "", float(found["ms"] or 0))
