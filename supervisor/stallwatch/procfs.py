"""Reading /proc: small, total functions. A vanished process is None, never an exception."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Stat:
    """The fields of /proc/PID/stat that decisions use. Ticks are clock ticks (SC_CLK_TCK)."""

    pid: int
    comm: str
    state: str  # R S D T t Z X I
    ppid: int
    session: int
    cpu_ticks: int  # utime + stime
    child_ticks: int  # cutime + cstime: children that were waited for
    start_ticks: int
    rss_pages: int
    threads: int
    minor_faults: int = 0  # pages that were in memory
    major_faults: int = 0  # pages that had to be read from storage


def _read(path: str) -> bytes | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(fd, 65536)
    except OSError:
        return None
    finally:
        os.close(fd)


def parse_stat(raw: bytes) -> Stat | None:
    """Parse one stat line; comm may hold spaces and brackets, so split after the last ')'."""
    left, right = raw.find(b"("), raw.rfind(b")")
    if left < 0 or right < left:
        return None
    f = raw[right + 2 :].split()
    if len(f) < 22:
        return None
    try:
        return Stat(
            pid=int(raw[:left]),
            comm=raw[left + 1 : right].decode("utf-8", "replace"),
            state=f[0].decode("ascii", "replace"),
            ppid=int(f[1]),
            session=int(f[3]),
            cpu_ticks=int(f[11]) + int(f[12]),
            child_ticks=int(f[13]) + int(f[14]),
            start_ticks=int(f[19]),
            rss_pages=int(f[21]),
            threads=int(f[17]),
            minor_faults=int(f[7]),
            major_faults=int(f[9]),
        )
    except ValueError:
        return None


def stat(pid: int, proc: Path = PROC) -> Stat | None:
    """The process's stat, or None when it is gone."""
    raw = _read(f"{proc}/{pid}/stat")
    return parse_stat(raw) if raw else None


def thread_stat(pid: int, tid: int, proc: Path = PROC) -> Stat | None:
    """One thread's stat (its own state and CPU), or None when it is gone."""
    raw = _read(f"{proc}/{pid}/task/{tid}/stat")
    return parse_stat(raw) if raw else None


def start_ticks(pid: int, proc: Path = PROC) -> int | None:
    """The start time that, with the pid, identifies a process; None when it is gone."""
    found = stat(pid, proc)
    return found.start_ticks if found else None


def is_alive(pid: int, ticks: int, proc: Path = PROC) -> bool:
    """True while that very process (pid and start ticks) exists and is no zombie."""
    found = stat(pid, proc)
    return found is not None and found.start_ticks == ticks and found.state not in "ZX"


def status(pid: int, proc: Path = PROC) -> dict[str, str]:
    """/proc/PID/status as a dict; empty when the process is gone."""
    raw = _read(f"{proc}/{pid}/status")
    if not raw:
        return {}
    pairs = (line.partition(":") for line in raw.decode("utf-8", "replace").splitlines())
    return {key: value.strip() for key, _, value in pairs}


def tracer_pid(pid: int, proc: Path = PROC) -> int:
    """Who traces the process (0: nobody, or gone)."""
    value = status(pid, proc).get("TracerPid", "0")
    return int(value) if value.isdigit() else 0


def tids(pid: int, proc: Path = PROC) -> frozenset[int]:
    """Its thread ids; empty when it is gone."""
    try:
        return frozenset(int(n) for n in os.listdir(f"{proc}/{pid}/task") if n.isdigit())
    except OSError:
        return frozenset()


def wchan(pid: int, tid: int | None = None, proc: Path = PROC) -> str:
    """The kernel function it sleeps in; '' when unknown, not permitted or running."""
    where = f"{proc}/{pid}/wchan" if tid is None else f"{proc}/{pid}/task/{tid}/wchan"
    raw = _read(where) or b""
    text = raw.decode("ascii", "replace").strip()
    return "" if text == "0" else text


def read_bytes(pid: int, proc: Path = PROC) -> int | None:
    """Bytes the process has read through read(2) and friends (rchar), or None."""
    raw = _read(f"{proc}/{pid}/io")
    for line in (raw or b"").splitlines():
        if line.startswith(b"rchar:"):
            return int(line.split()[1])
    return None


def cmdline(pid: int, proc: Path = PROC) -> tuple[str, ...]:
    """Its argument vector; empty when gone or a kernel thread."""
    raw = _read(f"{proc}/{pid}/cmdline") or b""
    return tuple(part.decode("utf-8", "replace") for part in raw.rstrip(b"\0").split(b"\0") if part)


def pids(proc: Path = PROC) -> list[int]:
    """Every pid now in the table."""
    try:
        return [int(n) for n in os.listdir(proc) if n.isdigit()]
    except OSError:
        return []
