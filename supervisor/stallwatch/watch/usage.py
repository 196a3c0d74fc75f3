"""What a process used between two looks: CPU, page faults, bytes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from stallwatch.watch.snapshot import ProcFacts, Snapshot


@dataclass(frozen=True, slots=True)
class Usage:
    """Differences of one process. None: the kernel did not say at both looks."""

    window_s: float
    cpu_ticks: int
    minor_faults: int  # a page that was in memory
    major_faults: int  # a page that had to be read from storage first
    read_bytes: int | None = None  # read(2) and the like, from files and pipes; not from sockets
    written_bytes: int | None = None


def usage(before: Snapshot, after: Snapshot, pid: int) -> Usage | None:
    """What that very process used from one look to the other; None unless it is in both."""
    old, new = before.processes.get(pid), after.processes.get(pid)
    window_ns = after.now_ns - before.now_ns
    if old is None or new is None or old.start_ticks != new.start_ticks or window_ns <= 0:
        return None
    return Usage(
        window_s=window_ns / 1e9,
        cpu_ticks=max(0, new.cpu_ticks - old.cpu_ticks),
        minor_faults=max(0, new.minor_faults - old.minor_faults),
        major_faults=max(0, new.major_faults - old.major_faults),
        read_bytes=_grown(old, new, "read_bytes"),
        written_bytes=_grown(old, new, "written_bytes"),
    )


def _grown(old: ProcFacts, new: ProcFacts, name: str) -> int | None:
    then, now = getattr(old, name), getattr(new, name)
    return None if then is None or now is None else max(0, now - then)
