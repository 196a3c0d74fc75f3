"""Before every start: is what the engine needs free? If not, who holds it?

An instant respawn onto a busy port or a full GPU burns the restart budget and says nothing; the
holder's name does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stallwatch import procfs
from stallwatch.errors import PreflightError
from stallwatch.process import sockets

_COMMAND = 120


@dataclass(frozen=True, slots=True)
class GpuHolder:
    """A process that still holds memory on a device; ours False: not a member, never touched."""

    pid: int
    device: str
    mib: int


class GpuGate(Protocol):
    """GPU memory against the level before our first engine."""

    def over_baseline(self) -> tuple[GpuHolder, ...]:
        """Who holds more than the allowance; empty when it is back. Bounded, never raises."""
        ...


class NoGpu:
    """No GPU, or no way to ask: says nothing, so nothing is held against the start."""

    def over_baseline(self) -> tuple[GpuHolder, ...]:
        return ()


class StillHeld(PreflightError):
    """Worth a new try after a wait: it may be on its way out."""


def describe(pid: int, proc: Path = procfs.PROC) -> str:
    """'pid 12 (python -m http.server 8001)', for people."""
    words = " ".join(procfs.cmdline(pid, proc))
    if not words:
        stat = procfs.stat(pid, proc)
        words = stat.comm if stat else ""
    short = words if len(words) <= _COMMAND else words[: _COMMAND - 3] + "..."
    return f"pid {pid} ({short})" if short else f"pid {pid}"


def check_port(port: int, proc: Path = procfs.PROC) -> None:
    """Raise StillHeld naming the holder if anything listens on the port."""
    inodes = sockets.listening(port, proc)
    if not inodes:
        return
    pids = tuple(sorted(set(sockets.holders(inodes, proc=proc).values())))
    if pids:
        who = " and ".join(describe(pid, proc) for pid in pids)
        hint = f"End it (kill {' '.join(map(str, pids))}), or choose another port."
    else:
        who = "a process of another user"
        hint = f"See `ss -ltnp 'sport = :{port}'` as root, or choose another port."
    raise StillHeld(f"port {port} is held by {who}", hint=hint, holders=pids)


def check_members(old: Mapping[int, int], proc: Path = procfs.PROC) -> None:
    """Raise StillHeld if a member (pid -> start ticks) of an earlier incarnation lives."""
    alive = tuple(pid for pid, ticks in old.items() if procfs.is_alive(pid, ticks, proc))
    if alive:
        who = ", ".join(describe(pid, proc) for pid in alive)
        raise StillHeld(
            f"the earlier incarnation still lives: {who}",
            hint="It survived SIGKILL or is on its way out; see `stallwatch status`.",
            holders=alive,
        )


def check_gpu(gate: GpuGate) -> None:
    """Raise StillHeld naming the holders if GPU memory has not come back."""
    held = gate.over_baseline()
    if held:
        who = ", ".join(f"{describe(h.pid)} with {h.mib} MiB on {h.device}" for h in held)
        raise StillHeld(
            f"GPU memory is still held by {who}",
            hint="End the holder; if it is no process of yours, the device needs a reset.",
            holders=tuple(h.pid for h in held),
        )


def preflight(
    *,
    port: int | None,
    old_members: Mapping[int, int] | None = None,
    gpu: GpuGate | None = None,
) -> None:
    """All checks, cheapest cause first. Raises StillHeld (retry) naming holders."""
    check_members(old_members or {})
    if port is not None:
        check_port(port)
    check_gpu(gpu or NoGpu())
