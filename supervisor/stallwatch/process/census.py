"""Which processes are new since the last look, at a price that does not grow with the host.

Reading /proc/PID/stat of every process ten times a second costs 12 us each: 4 % of a core at 300
processes. /proc/PID/task/TID/children would do, but kernels without CONFIG_PROC_CHILDREN have no
such file, and it is only exact for stopped processes. So: the last pid given out (fifth field of
/proc/loadavg, 1.2 us) says whether anything was born at all; if so, one listing of /proc names the
newborn, and only those are read, as often as 1/500 of a core allows. Everything is read again now
and then, in case a pid was reused between two looks, and before every kill.
"""

from __future__ import annotations

import os
from pathlib import Path

from stallwatch import procfs
from stallwatch.clock import Clock, SystemClock

_LIST_NS = 1_000_000_000  # lxcfs may show a loadavg of its own: list this often whatever it says
_FULL_NS = 5_000_000_000
_LIST_SHARE = 500
_FULL_SHARE = 1000  # a full reading costs at most 1/1000 of a core


class Census:
    """Newborn processes, oldest first. Not thread-safe: its owner holds a lock."""

    def __init__(self, *, clock: Clock | None = None, proc: Path = procfs.PROC) -> None:
        self._clock = clock or SystemClock()
        self._proc = proc
        self._seen: frozenset[int] = frozenset()
        self._last_pid = b""
        self._next_list = 0
        self._not_before = 0
        self._born = False
        self._next_full = 0
        try:
            self._loadavg = os.open(proc / "loadavg", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._loadavg = -1

    def look(self, *, full: bool = False) -> list[procfs.Stat]:
        """The processes not seen before; with full, all."""
        now = self._clock.monotonic_ns()
        full = full or now >= self._next_full
        self._born = self._anything_born() or self._born
        if not full and (now < self._not_before or not (self._born or now >= self._next_list)):
            return []
        self._next_list = now + _LIST_NS
        self._born = False
        pids = frozenset(procfs.pids(self._proc))
        wanted = pids if full else pids - self._seen
        self._seen = pids
        stats = [s for s in (procfs.stat(pid, self._proc) for pid in wanted) if s is not None]
        took = self._clock.monotonic_ns() - now
        if full:
            self._next_full = now + max(_FULL_NS, _FULL_SHARE * took)
        else:
            self._not_before = now + _LIST_SHARE * took
        stats.sort(key=lambda s: (s.start_ticks, s.pid))
        return stats

    def close(self) -> None:
        if self._loadavg >= 0:
            os.close(self._loadavg)
            self._loadavg = -1

    def _anything_born(self) -> bool:
        if self._loadavg < 0:
            return True
        try:
            last = os.pread(self._loadavg, 128, 0).rsplit(b" ", 1)[-1]
        except OSError:
            return True
        born, self._last_pid = last != self._last_pid, last
        return born
