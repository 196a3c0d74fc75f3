"""Who listens on a port: /proc/net/tcp{,6} gives the socket, /proc/PID/fd its owner."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from stallwatch import procfs

_LISTEN = "0A"  # TIME_WAIT (06) is not busy: vLLM and uvicorn set SO_REUSEADDR


def listening(port: int, proc: Path = procfs.PROC) -> frozenset[int]:
    """Inodes of the sockets that listen on a TCP port, IPv4 and IPv6, any address."""
    found = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if len(fields) > 9 and fields[3] == _LISTEN:
                local = fields[1].rpartition(":")[2]
                if int(local, 16) == port:
                    found.add(int(fields[9]))
    return frozenset(found)


def holders(
    inodes: frozenset[int], among: Iterable[int] | None = None, proc: Path = procfs.PROC
) -> dict[int, int]:
    """Which process holds each socket: inode -> pid. Those we may not look into are missing."""
    left = {f"socket:[{inode}]": inode for inode in inodes}
    found: dict[int, int] = {}
    for pid in procfs.pids(proc) if among is None else among:
        if len(found) == len(left):
            break
        for target in _targets(pid, proc):
            if target in left:
                found.setdefault(left[target], pid)
    return found


def _targets(pid: int, proc: Path) -> Iterable[str]:
    folder = f"{proc}/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        try:
            yield os.readlink(f"{folder}/{name}")
        except OSError:
            continue
