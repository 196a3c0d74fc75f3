"""Utilisation beside power: a busy device that draws little power spins, an idle one misses an event. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

BUSY, IDLE = 90.0, 5.0  # per cent of the time in which a kernel ran
LOW_POWER = 0.35  # of the device's limit; real work on a busy device draws more
MAX_NAMED = 4


def said(gpu: Mapping[str, Any], pid: int) -> str:
    """What the process's devices did while it waited, in one clause; '' when nothing is known.

    Of devices nobody tells apart, all are named. Only tools that give plain numbers are read.
    """
    devices = _of(gpu, pid)
    words = [word for one in devices[:MAX_NAMED] if (word := _one(one))]
    return "; ".join(words)


def _of(gpu: Mapping[str, Any], pid: int) -> Sequence[Mapping[str, Any]]:
    devices = [d for d in gpu.get("devices", ()) if isinstance(d, Mapping)]
    holders = [h for h in gpu.get("holders", ()) if isinstance(h, Mapping)]
    held = {h.get("uuid") for h in holders if str(h.get("pid")) == str(pid)}
    mine = [d for d in devices if d.get("uuid") in held]
    return mine or devices


def _one(device: Mapping[str, Any]) -> str:
    busy = _number(device.get("utilization.gpu"))
    power, limit = _number(device.get("power.draw")), _number(device.get("power.limit"))
    if busy is None:
        return ""
    name = f"device {device.get('index', '?')}"
    if busy <= IDLE:
        return f"{name} is idle: the event that is waited for is missing"
    if busy < BUSY:
        return f"{name} is {busy:.0f} % busy"
    if power is not None and limit and power <= LOW_POWER * limit:
        return f"{name} is {busy:.0f} % busy at {power:.0f} of {limit:.0f} W: a kernel spins"
    drawn = f" at {power:.0f} W" if power is not None else ""
    return f"{name} is {busy:.0f} % busy{drawn}"


def _number(value: object) -> float | None:
    try:
        number = float(str(value))
    except ValueError:
        return None
    return number if 0 <= number < 1e6 else None
