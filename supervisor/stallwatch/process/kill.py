"""The end of a failed tree: SIGKILL for every recorded process, until none lives or 10 s are over.

No SIGTERM: a healthy part of a stalled tree would answer it with hanging clients and truncated
200s. No SIGCONT: what was stopped must not run another line. Python's resource_tracker is spared
at first, because it unlinks the shared memory that the dead leave behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from stallwatch import procfs
from stallwatch.process.bounded import bounded
from stallwatch.process.members import Membership
from stallwatch.process.shared import sweep

_TRACKER = "from multiprocessing.resource_tracker import main"
_ASK_S = 0.5
_QUIET_ROUNDS = 2  # more rounds mean that it forks
_CALM_LOOKS = 10
_CALM_S = 0.02
_GROUPS_AFTER = 8  # rounds with new members before whole groups are killed, trackers included


@dataclass(frozen=True, slots=True)
class KillLimits:
    """Seconds."""

    pending_s: float = 1.0
    die_s: float = 10.0
    tracker_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Survivor:
    """A process that SIGKILL did not end, and what the kernel says it does."""

    pid: int
    comm: str
    state: str
    wchan: str

    def __str__(self) -> str:
        where = f", in {self.wchan}" if self.wchan else ""
        return f"pid {self.pid} ({self.comm}) in state {self.state}{where}"


@dataclass(frozen=True, slots=True)
class KillResult:
    """gone False: UNKILLABLE, by `survivors`."""

    gone: bool
    survivors: tuple[Survivor, ...] = ()
    killed: int = 0  # processes that were signalled
    rounds: int = 0
    unlinked: tuple[str, ...] = ()  # /dev/shm files that nobody maps any more
    waited_s: float = 0.0  # for pending requests
    took_s: float = 0.0

    def words(self) -> str:
        """One sentence for the event log."""
        if not self.gone:
            return "survived SIGKILL: " + "; ".join(map(str, self.survivors))
        files = len(self.unlinked)
        swept = f", {files} shared memory file{_s(files)} removed" if files else ""
        return f"{self.killed} process{_es(self.killed)} killed in {self.took_s:.2f} s{swept}"


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def _es(count: int) -> str:
    return "" if count == 1 else "es"


def is_tracker(pid: int) -> bool:
    """Python's resource_tracker: `python -c 'from multiprocessing.resource_tracker import main...'`.

    Only the beginning of an argument counts: a program that merely mentions it is no tracker.
    """
    return any(item.startswith(_TRACKER) for item in procfs.cmdline(pid))


def trackers(pids: Iterable[int]) -> frozenset[int]:
    """Which of them are. One that cannot be asked within half a second is none."""
    found: set[int] = set()

    def ask() -> None:
        found.update(pid for pid in pids if is_tracker(pid))

    bounded(ask, _ASK_S, None)
    return frozenset(found)


def kill(
    members: Membership,
    *,
    pending: Callable[[], int | None] | None = None,
    limits: KillLimits = KillLimits(),
) -> KillResult:
    """End the tree. Blocks for at most pending_s + die_s + tracker_s + what /proc takes.

    `pending` counts the requests that are still being answered; None means nobody knows, and is
    not waited for.
    """
    began = time.monotonic()
    _wait_for(pending, limits.pending_s)
    waited = time.monotonic() - began
    members.expect_exits()
    members.scan()
    files = members.shared.of(members.members(), besides=members.board)
    hunt = _Hunt(members)
    hunt.run(limits.die_s)
    if not hunt.left():
        _finish_trackers(members, limits)
    else:
        hunt.strike(set(members.members()))
    survivors = tuple(_survivor(pid) for pid in members.members())
    return KillResult(
        gone=not survivors,
        survivors=survivors,
        killed=len(hunt.struck),
        rounds=hunt.rounds,
        unlinked=() if survivors else sweep(files),
        waited_s=waited,
        took_s=time.monotonic() - began,
    )


def _wait_for(pending: Callable[[], int | None] | None, seconds: float) -> None:
    until = time.monotonic() + seconds
    while pending is not None and pending() and time.monotonic() < until:
        time.sleep(0.01)


class _Hunt:
    """Rounds of SIGKILL. A fork between look and strike is met in the next round."""

    def __init__(self, members: Membership) -> None:
        self._members = members
        self._trackers: set[int] = set()
        self.struck: set[int] = set()
        self.rounds = 0

    def left(self) -> set[int]:
        """Living members, trackers excepted."""
        living = set(self._members.members())
        fresh = living - self.struck - self._trackers
        if fresh:
            self._trackers |= trackers(fresh)
        return living - self._trackers

    def strike(self, targets: set[int]) -> None:
        for pid in targets:
            self._members.signal(pid, signal.SIGKILL)
        self.struck |= targets

    def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        calm = 0
        while time.monotonic() < until:
            targets = self.left()
            if not targets:
                # Nobody is left, or somebody was born between two looks: a quiet tree is asked
                # once, one that forked while it was being killed until it has been quiet.
                if self._members.scan(maps=calm == 0):
                    calm = 0
                    continue
                calm += 1
                if calm > (_CALM_LOOKS if self.rounds > _QUIET_ROUNDS else 0):
                    return
                time.sleep(_CALM_S)
                continue
            self._round(targets)

    def _round(self, targets: set[int]) -> None:
        fresh = targets - self.struck
        self.rounds += 1
        self.strike(targets)
        if fresh and self.rounds > _GROUPS_AFTER:
            self._strike_groups()
        if fresh and self.rounds > 1:
            self._members.scan(maps=False)  # at once: what forked is met before it forks again
            return
        self._members.wait_any(0.05)
        self._members.poll()

    def _strike_groups(self) -> None:
        """Forking faster than we look: a signal to a group is atomic against fork."""
        for session in self._members.sessions():
            with contextlib.suppress(OSError):
                if session != os.getsid(0):
                    os.killpg(session, signal.SIGKILL)


def _finish_trackers(members: Membership, limits: KillLimits) -> None:
    if members.wait(limits.tracker_s):
        return
    for pid in members.members():
        members.signal(pid, signal.SIGKILL)
    members.wait(limits.die_s)


def _survivor(pid: int) -> Survivor:
    stat = procfs.stat(pid)
    return Survivor(
        pid=pid,
        comm=stat.comm if stat else "",
        state=stat.state if stat else "?",
        wchan=procfs.wchan(pid),
    )
