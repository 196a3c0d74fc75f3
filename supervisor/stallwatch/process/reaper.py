"""Reaping: orphans come to us (subreaper), tools belong to their own Popen, nobody waits."""

from __future__ import annotations

import ctypes
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from stallwatch import procfs
from stallwatch.clock import Clock, SystemClock
from stallwatch.process.pidfd import Status

_PR_SET_CHILD_SUBREAPER = 36
_KEPT = 1024
_STRANGER_NS = 500_000_000  # how long an unknown zombie is left to whoever may own it
_NEWBORN_NS = 10_000_000_000  # during a spawn: it may be the one that died at once
_SCAN_NS = 500_000_000
_SCAN_MAX_NS = 10_000_000_000


class Owned(Protocol):
    """Who owns children through Popen. `pids()` waits for a start under way (ToolRegistry)."""

    def pids(self) -> Iterable[int]: ...


class Nobody:
    """No Popen in this process."""

    def pids(self) -> Iterable[int]:
        return ()


def become_subreaper() -> bool:
    """Orphans of our descendants become our children. False: the kernel refused."""
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


class Reaper:
    """Takes the exit status of every child that no Popen owns. Thread-safe; never blocks.

    waitid(P_ALL, WNOWAIT) shows the same zombie again and again, so one that belongs to a Popen
    hides all others behind it. It is used only to ask whether there is any; which ones is read
    from /proc, at a falling rate while there is nothing for us. Members do not wait for that:
    their own pidfd says when, and `collect` takes them.
    """

    def __init__(
        self, owned: Owned | None = None, *, clock: Clock | None = None, proc: Path = procfs.PROC
    ) -> None:
        self._owned = owned or Nobody()
        self._clock = clock or SystemClock()
        self._proc = proc
        self._lock = threading.Lock()
        self._taken: OrderedDict[tuple[int, int], Status] = OrderedDict()
        self._seen: dict[tuple[int, int], int] = {}
        self._next_scan = 0
        self._interval = _SCAN_NS
        self._spawns = 0  # under way
        self.reaped = 0  # orphans taken, for the curious

    @contextmanager
    def hold(self) -> Iterator[None]:
        """No new zombie is reaped inside: for the moment between a spawn and its pidfd.

        Nobody waits for it: a spawn lasts as long as the file system of its program likes.
        """
        with self._lock:
            self._spawns += 1
        try:
            yield
        finally:
            with self._lock:
                self._spawns -= 1

    def collect(self, pid: int, ticks: int, pidfd: int) -> Status | None:
        """The status of a member that ended; None when it is not our child."""
        with self._lock:
            known = self._taken.pop((pid, ticks), None)
            if known is not None:
                return known
            try:
                got = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
            except OSError:
                return None
        return _status(got) if got else None

    def poll(self) -> int:
        """Reap orphans that nobody claims; returns how many. Cheap when there is no zombie."""
        with self._lock:
            now = self._clock.monotonic_ns()
            if now < self._next_scan or not _any_zombie():
                return 0
            count = self._scan(now)
            self._interval = _SCAN_NS if count else min(2 * self._interval, _SCAN_MAX_NS)
            if self._seen:
                self._interval = _SCAN_NS  # one is waiting for its time
            self._next_scan = now + self._interval
            self.reaped += count
            return count

    def _scan(self, now: int) -> int:
        zombies = self._zombies()
        owned = frozenset(self._owned.pids())  # asked after the look: see ToolRegistry
        self._seen = {key: at for key, at in self._seen.items() if key in zombies}
        patience = _NEWBORN_NS if self._spawns else _STRANGER_NS
        count = 0
        for key in zombies:
            if key[0] in owned:
                continue
            if now - self._seen.setdefault(key, now) >= patience:
                count += self._take(key)
                self._seen.pop(key, None)
        return count

    def _zombies(self) -> set[tuple[int, int]]:
        us = os.getpid()
        stats = (procfs.stat(pid, self._proc) for pid in procfs.pids(self._proc))
        return {(s.pid, s.start_ticks) for s in stats if s and s.ppid == us and s.state == "Z"}

    def _take(self, key: tuple[int, int]) -> bool:
        try:
            got = os.waitid(os.P_PID, key[0], os.WEXITED | os.WNOHANG)
        except OSError:
            return False
        if got is None:
            return False
        self._taken[key] = _status(got)
        while len(self._taken) > _KEPT:
            self._taken.popitem(last=False)
        return True


def _any_zombie() -> bool:
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except OSError:  # ECHILD
        return False


def _status(got: os.waitid_result) -> Status:
    if got.si_code == os.CLD_EXITED:
        return Status(code=got.si_status)
    return Status(signal=got.si_status)
