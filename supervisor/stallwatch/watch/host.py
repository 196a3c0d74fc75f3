"""Witnesses about the machine, read from cgroups (v1 and v2) and PSI. Total: None is 'unknown'."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from stallwatch.watch.policy import S
from stallwatch.watch.snapshot import HostFacts

CGROUP = Path("/sys/fs/cgroup")
PROC = Path("/proc")
MAX_LEVELS = 8
FRESH_NS = S  # cumulative counters are compared over seconds: once a second is enough


@dataclass(frozen=True, slots=True)
class _Files:
    throttled: tuple[str, ...]
    frozen: tuple[str, ...]
    pressure: tuple[str, ...]


class HostWitness:
    """Facts about the cgroup of one process and its ancestors (a quota may sit on any of them)."""

    def __init__(self, pid: int | None = None, *, proc: Path = PROC, cgroup: Path = CGROUP) -> None:
        self._files = _files(proc, cgroup, "self" if pid is None else str(pid))
        self._at_ns: int | None = None
        self._last = HostFacts()

    def facts(self, now_ns: int, *, late_ns: int = 0) -> HostFacts:
        """What is known now; the files themselves are read at most once a second."""
        if self._at_ns is None or now_ns - self._at_ns >= FRESH_NS:
            self._at_ns = now_ns
            self._last = HostFacts(
                throttled_usec=_throttled(self._files.throttled),
                frozen=any(_is_frozen(path) for path in self._files.frozen),
                cpu_full_usec=_first_full(self._files.pressure),
            )
        if not late_ns:
            return self._last
        last = self._last
        return HostFacts(late_ns, last.throttled_usec, last.frozen, last.cpu_full_usec)


def _files(proc: Path, cgroup: Path, who: str) -> _Files:
    v1: dict[str, str] = {}
    v2 = ""
    for line in _text(f"{proc}/{who}/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers:
            v1.update(dict.fromkeys(controllers.split(","), path))
        else:
            v2 = path
    throttled = _levels(f"{cgroup}/cpu", v1["cpu"]) if "cpu" in v1 else ()
    frozen = _levels(f"{cgroup}/freezer", v1["freezer"]) if "freezer" in v1 else ()
    unified = _levels(str(cgroup), v2) if os.path.exists(f"{cgroup}/cgroup.controllers") else ()
    return _Files(
        throttled=_existing(*(f"{d}/cpu.stat" for d in (*unified, *throttled))),
        frozen=_existing(
            *(f"{d}/cgroup.freeze" for d in unified), *(f"{d}/freezer.state" for d in frozen)
        ),
        # "full" of the whole machine has no meaning for CPU and reads 0 since Linux 5.13; it is
        # the last resort for kernels that have no cgroup pressure.
        pressure=_existing(*(f"{d}/cpu.pressure" for d in unified), f"{proc}/pressure/cpu"),
    )


def _levels(mount: str, path: str) -> tuple[str, ...]:
    """The cgroup's folder and its ancestors, own first.

    In a container without a cgroup namespace the path is the host's and does not exist here; the
    ancestors then end at the mount, which is the container's own cgroup.
    """
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    folders = [mount + "".join(f"/{p}" for p in parts[:n]) for n in range(len(parts), -1, -1)]
    return tuple(folders[:MAX_LEVELS])


def _existing(*paths: str) -> tuple[str, ...]:
    return tuple(path for path in paths if os.path.exists(path))


def _text(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(65536)
    except OSError:
        return ""


def _throttled(paths: tuple[str, ...]) -> int | None:
    """Sum over the levels, in microseconds (v1 counts throttled_time in ns)."""
    total: int | None = None
    for path in paths:
        for line in _text(path).splitlines():
            key, _, value = line.partition(" ")
            if value.strip().isdigit() and key in ("throttled_usec", "throttled_time"):
                usec = int(value) // (1 if key == "throttled_usec" else 1000)
                total = (total or 0) + usec
    return total


def _is_frozen(path: str) -> bool:
    return _text(path).strip() in ("1", "FROZEN", "FREEZING")


def _first_full(paths: tuple[str, ...]) -> int | None:
    for path in paths:
        for line in _text(path).splitlines():
            if line.startswith("full"):
                total = line.rpartition("total=")[2].strip()
                if total.isdigit():
                    return int(total)
    return None
