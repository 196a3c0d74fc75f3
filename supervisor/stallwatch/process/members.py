"""Who belongs to an engine. Membership only grows; it is left by exit and by nothing else.

Process groups, sessions and parents can all be left (setsid, double fork), environments can be
wiped (setproctitle does). So every way of belonging is used, and once in is in. Sources: children
of members and processes in a member's session (each tick), orphans that came to us as subreaper,
registrations in the board, and, before a kill, whoever maps the board. What a process writes into
the board is a claim, not a fact: it counts only if that process really maps the board.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from stallwatch import procfs
from stallwatch.clock import Clock, SystemClock
from stallwatch.process import pidfd, shared
from stallwatch.process.census import Census
from stallwatch.process.maps import FileId
from stallwatch.process.oom import OomCounter
from stallwatch.process.reaper import Nobody, Owned, Reaper
from stallwatch.process.shared import SharedMemory
from stallwatch.watch.snapshot import Exit

_EVER_KEPT = 4096  # the dead beyond this are forgotten, oldest first
_EXITS_KEPT = 512  # short-lived helpers are members too: ldconfig, compilers, ...
_REFUSED_NS = 5_000_000_000
_ORPHAN_LOOKS = 2  # a tool of ours is unlisted for less than one tick
_POLL_MS = 50

Registration = tuple[int, int]  # pid, start ticks


@dataclass(slots=True)
class _Member:
    pid: int
    start_ticks: int
    fd: int
    comm: str
    ppid: int = 0  # when it joined: an orphan's is ours
    root: bool = False
    expected: bool = False  # it said goodbye on the board


class Membership:
    """The living and dead members of one incarnation. Thread-safe.

    `board` is the identity of the board file, `owned` lists our own tools (never members),
    `adopt_orphans` lets it take orphans that nothing ties to another engine: right when the
    daemon has one engine. `on_change` is called after each growth, outside the lock.
    """

    def __init__(
        self,
        *,
        reaper: Reaper,
        owned: Owned | None = None,
        board: FileId | None = None,
        adopt_orphans: bool = True,
        on_change: Callable[[], None] | None = None,
        clock: Clock | None = None,
        proc: Path = procfs.PROC,
    ) -> None:
        self.board = board
        self.root_pid = 0
        self.shared = SharedMemory()
        self._reaper = reaper
        self._owned = owned or Nobody()
        self._adopt = adopt_orphans
        self._on_change = on_change
        self._clock = clock or SystemClock()
        self._proc = proc
        self._lock = threading.RLock()
        self._census = Census(clock=self._clock, proc=proc)
        self._living: dict[int, _Member] = {}
        self._ever: dict[int, int] = {}
        self._grown = 0
        self._sessions: set[int] = set()
        self._exits: deque[Exit] = deque(maxlen=_EXITS_KEPT)
        self._poller = select.poll()
        self._orphans: dict[Registration, int] = {}
        self._refused: dict[Registration, int] = {}
        self._expecting = False
        self._oom: OomCounter | None = None
        self._changed = False
        self._closed = False

    # -- growing ---------------------------------------------------------------------------

    def add_root(self, pid: int, ticks: int, fd: int) -> None:
        """The engine's first process. The descriptor becomes ours."""
        with self._lock:
            self.root_pid = pid
            stat = procfs.stat(pid, self._proc)
            self._enter(_Member(pid, ticks, fd, stat.comm if stat else "", root=True))
            self._sessions.add(pid)
            self._oom = OomCounter.of(pid, proc=self._proc)
        self._tell()

    def add(self, pid: int, ticks: int) -> bool:
        """A member by name, as a state file gives it. False: gone, or the pid is another's now."""
        with self._lock:
            stat = procfs.stat(pid, self._proc)
            if stat is None or stat.start_ticks != ticks:
                return False
            joined = self._join(stat)
        self._tell()
        return joined

    def poll(
        self, registered: Iterable[Registration] = (), *, detached: Iterable[Registration] = ()
    ) -> list[Exit]:
        """One tick: find the newborn, believe the registered, and return who ended since.

        `registered` and `detached` are (pid, start ticks) from the board at this look.
        """
        with self._lock:
            if self._closed:
                return []
            grew = self._register(registered)
            for pid, ticks in detached:
                member = self._living.get(pid)
                if member is not None and member.start_ticks == ticks:
                    member.expected = True
            self._absorb(self._census.look(full=grew))
            ended = self._reap_members()
        self._tell()
        return ended

    def scan(self, *, maps: bool = True) -> int:
        """Look at every process, its maps included; returns how many joined. For before a kill.

        Without `maps` it takes a few milliseconds: for a tree that forks while it is being killed.
        """
        with self._lock:
            if self._closed:
                return 0
            before = self._grown
            self._absorb(self._census.look(full=True), settle=True)
            ignore = {os.getpid(), *self._owned.pids(), *self._living}
        # Without the lock: a process that hangs in its driver may block whoever reads its maps.
        board = self.board if maps else None
        mapping = shared.who_maps(board, ignore=ignore) if board else frozenset()
        with self._lock:
            for pid in mapping:
                stat = procfs.stat(pid, self._proc)
                if stat is not None:
                    self._join(stat)
            if mapping:
                self._absorb(self._census.look(full=True), settle=True)
            joined = self._grown - before
        self._tell()
        return joined

    # -- asking ----------------------------------------------------------------------------

    def members(self) -> dict[int, int]:
        """The living: pid -> start ticks."""
        with self._lock:
            return {pid: member.start_ticks for pid, member in self._living.items()}

    def ever(self) -> Mapping[int, int]:
        """Every member there ever was (of the dead, the latest 4096): pid -> start ticks."""
        with self._lock:
            return dict(self._ever)

    def exits(self) -> tuple[Exit, ...]:
        """Every exit of this incarnation, oldest first (the latest 512)."""
        with self._lock:
            return tuple(self._exits)

    def sessions(self) -> frozenset[int]:
        with self._lock:
            return frozenset(self._sessions)

    def wait(self, timeout_s: float) -> bool:
        """Wait until no member lives; False when the time was over first."""
        until = time.monotonic() + timeout_s
        while True:
            self.poll()
            if not self.members():
                return True
            left = until - time.monotonic()
            if left <= 0:
                return False
            self.wait_any(left)

    def wait_any(self, timeout_s: float) -> None:
        """Wait for some member's end, 50 ms at most: another thread may meanwhile reap it."""
        with self._lock:
            fds = [member.fd for member in self._living.values()]
        poller = select.poll()
        for fd in fds:
            poller.register(fd, select.POLLIN)
        if fds:
            poller.poll(max(0, min(_POLL_MS, timeout_s * 1000)))

    # -- acting ----------------------------------------------------------------------------

    def expect_exits(self) -> None:
        """From now on every exit was asked for."""
        with self._lock:
            self._expecting = True

    def signal(self, pid: int, number: int) -> bool:
        """Signal a living member by its pidfd; False when it is no member, gone or refused."""
        with self._lock:
            member = self._living.get(pid)
            return member is not None and pidfd.send(member.fd, number)

    def close(self) -> None:
        """Let go of all descriptors. Members that live are forgotten, not ended."""
        with self._lock:
            for member in self._living.values():
                os.close(member.fd)
            self._living.clear()
            self._census.close()
            self._closed = True

    # -- inside, with the lock held ------------------------------------------------------------

    def _tell(self) -> None:
        with self._lock:
            changed, self._changed = self._changed, False
        if changed and self._on_change is not None:
            self._on_change()

    def _enter(self, member: _Member) -> None:
        self._living[member.pid] = member
        self._ever[member.pid] = member.start_ticks
        self._grown += 1
        if len(self._ever) > _EVER_KEPT:
            dead = [pid for pid in self._ever if pid not in self._living and pid != self.root_pid]
            for pid in dead[: _EVER_KEPT // 4]:
                del self._ever[pid]
        self._poller.register(member.fd, select.POLLIN)
        self._changed = True

    def _join(self, stat: procfs.Stat) -> bool:
        if stat.pid in self._living or stat.pid in (os.getpid(), 1):
            return False
        if self._ever.get(stat.pid) == stat.start_ticks:
            return False  # it ended before, and is a zombie now
        fd = pidfd.open_exact(stat.pid, stat.start_ticks, self._proc)
        if fd is None:
            return False
        self._enter(_Member(stat.pid, stat.start_ticks, fd, stat.comm, stat.ppid))
        # Only a session that a member leads: one that attached from a shell must not drag the
        # shell's other jobs in.
        if stat.session in self._ever:
            self._sessions.add(stat.session)
        return True

    def _absorb(self, stats: list[procfs.Stat], *, settle: bool = False) -> None:
        """Take in who belongs, and then who belongs to those, until nobody is left over."""
        if not stats and not self._orphans:
            return
        owned = frozenset(self._owned.pids())
        strangers = [s for s in (*stats, *self._again(stats)) if s.pid not in owned]
        while True:
            left = [s for s in strangers if not (self._belongs(s) and self._join(s))]
            if len(left) == len(strangers):
                break
            strangers = left
        self._orphans = {
            (s.pid, s.start_ticks): looks
            for s in strangers
            if (looks := self._looks(s, settle=settle))
        }
        ripe = [
            s for s in strangers if self._orphans.get((s.pid, s.start_ticks), 0) >= _ORPHAN_LOOKS
        ]
        for stat in ripe:
            del self._orphans[stat.pid, stat.start_ticks]
            self._join(stat)

    def _again(self, stats: list[procfs.Stat]) -> list[procfs.Stat]:
        """Orphans that wait for their second look, if this look did not bring them anyway."""
        known = {s.pid for s in stats}
        again = (procfs.stat(pid, self._proc) for pid, _ in self._orphans if pid not in known)
        return [s for s in again if s is not None]

    def _belongs(self, s: procfs.Stat) -> bool:
        return s.ppid in self._living or s.session in self._sessions

    def _looks(self, s: procfs.Stat, *, settle: bool) -> int:
        """How often an orphan was seen that may be ours; 0: it cannot be."""
        if not self._adopt or s.ppid != os.getpid() or s.state == "Z" or s.pid in self._living:
            return 0
        if s.start_ticks < self._ever.get(self.root_pid, 0):
            return 0  # older than the engine
        if settle:  # a kill: one that lives for 30 ms is never seen twice
            return _ORPHAN_LOOKS
        return self._orphans.get((s.pid, s.start_ticks), 0) + 1

    def _register(self, registered: Iterable[Registration]) -> bool:
        """Believe registrations of processes that map the board; True when somebody joined."""
        joined = False
        for pid, ticks in registered:
            member = self._living.get(pid)
            if member is not None or self._ever.get(pid) == ticks:
                continue
            joined = self._believe(pid, ticks) or joined
        return joined

    def _believe(self, pid: int, ticks: int) -> bool:
        now = self._clock.monotonic_ns()
        if self.board is None or now < self._refused.get((pid, ticks), 0):
            return False
        stat = procfs.stat(pid, self._proc)
        honest = (
            stat is not None
            and stat.start_ticks == ticks
            and pid not in self._owned.pids()
            and shared.maps_file(pid, self.board)
        )
        if stat is not None and honest:
            return self._join(stat)
        if len(self._refused) >= _EXITS_KEPT:
            self._refused.clear()
        self._refused[pid, ticks] = now + _REFUSED_NS
        return False

    def _reap_members(self) -> list[Exit]:
        ready = self._poller.poll(0)
        if not ready:
            return []
        fds = {fd for fd, _ in ready}
        gone = [member for member in self._living.values() if member.fd in fds]
        ends = [(member, self._status(member)) for member in gone]
        killed = any(status and status.signal == 9 for _, status in ends)
        oom = killed and self._oom is not None and self._oom.grew()
        exits = [self._exit(member, status, oom=oom) for member, status in ends]
        for member in gone:
            self._poller.unregister(member.fd)
            os.close(member.fd)
            del self._living[member.pid]
        self._exits.extend(exits)
        return exits

    def _status(self, member: _Member) -> pidfd.Status | None:
        key = member.pid, member.start_ticks
        return (
            self._reaper.collect(*key, member.fd)
            or pidfd.zombie_status(*key, self._proc)
            or pidfd.exit_info(member.fd)  # last: its parent may reap it at any moment
        )

    def _exit(self, member: _Member, status: pidfd.Status | None, *, oom: bool) -> Exit:
        return Exit(
            pid=member.pid,
            start_ticks=member.start_ticks,
            at_ns=self._clock.monotonic_ns(),
            root=member.root,
            status=status.code if status else None,
            signal=status.signal if status else None,
            comm=member.comm,
            oom_killed=bool(oom and status and status.signal == 9),
            # A goodbye of the root is none of the engine: it ends, and nobody asked it to.
            expected=self._expecting or (member.expected and not member.root),
            ppid=member.ppid,
        )
