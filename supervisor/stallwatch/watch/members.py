"""/proc facts of an engine's members at ten looks a second: cheap for all, thorough for suspects."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from stallwatch import procfs
from stallwatch.watch.policy import S
from stallwatch.watch.snapshot import ProcFacts, ThreadFacts

REFRESH_NS = S  # thread lists, thread facts and I/O counters are read again after this
MAX_THREADS = 96  # of one suspect; lanes' own threads come first
EVERY_LOOK = 16  # members; of more, calm ones are read at every second look (200 ms)
# Whose threads with lanes all beat since the last look is not stopped: every eighth look is often
# enough. Its lanes may in truth be written by another process; then a stop is found that much later.
REST, LIVELY_REST = 1, 7  # masks for the number of the look
_ODD_STATES = ("t", "T")
MAX_OPEN = 256  # stat files kept open; a pread is half the price of open, read, close


@dataclass(frozen=True, slots=True)
class Wants:
    """What one look needs beyond the stat line."""

    now_ns: int
    suspects: Collection[int] = frozenset()
    fresh: bool = False  # read the suspects' threads again whatever their age
    io: bool = False
    lanes: Mapping[int, Collection[int]] = field(default_factory=dict)  # pid -> its lanes' tids
    lively: Collection[int] = frozenset()  # pids of which every thread with a lane just beat


@dataclass(slots=True)
class _Member:
    fd: int = -1
    raw: bytes = b""
    facts: ProcFacts | None = None
    tids_ns: int = -REFRESH_NS
    threads_ns: int = -REFRESH_NS
    io_ns: int = -REFRESH_NS


class Members:
    """Reads and caches the members' facts. One thread only; `close` gives the open files back."""

    def __init__(self, proc: Path = procfs.PROC) -> None:
        self._proc = proc
        self._known: dict[int, _Member] = {}
        self._looks = 0
        self._found: dict[int, ProcFacts] = {}
        self._ticks: Mapping[int, int] = {}

    def look(self, members: Mapping[int, int], wants: Wants) -> dict[int, ProcFacts]:
        """Facts of every member that lives: that very process (start ticks), no zombie."""
        for pid in [pid for pid in self._known if pid not in members]:
            self._forget(pid)
        self._looks += 1
        found: dict[int, ProcFacts] = {}
        due: Collection[int] = members
        if len(members) > EVERY_LOOK and not wants.suspects and not wants.io:
            found, due = self._calm(members, wants.lively)
        for pid in due:
            facts = self._one(pid, members[pid], wants)
            if facts is not None:
                found[pid] = facts
            else:
                found.pop(pid, None)
        self._found, self._ticks = found, dict(members)
        return dict(found)

    def _calm(
        self, members: Mapping[int, int], lively: Collection[int]
    ) -> tuple[dict[int, ProcFacts], Collection[int]]:
        """The last look's facts, which may stand for this one, and who is to be read all the same."""
        if members != self._ticks:
            return {}, members
        looks = self._looks
        due = [
            pid for pid in members if not (pid + looks) & (LIVELY_REST if pid in lively else REST)
        ]
        odd = [
            pid
            for pid in members
            if (facts := self._found.get(pid)) is None or facts.state in _ODD_STATES
        ]
        return self._found, {*due, *odd}

    def close(self) -> None:
        """Close every file."""
        for pid in list(self._known):
            self._forget(pid)

    def _forget(self, pid: int) -> None:
        member = self._known.pop(pid, None)
        if member is not None and member.fd >= 0:
            os.close(member.fd)

    def _one(self, pid: int, ticks: int, wants: Wants) -> ProcFacts | None:
        member = self._known.get(pid)
        if member is None:
            member = self._known[pid] = _Member(fd=self._open(pid))
        raw = self._read(pid, member)
        if raw != member.raw or member.facts is None:
            member.raw, member.facts = raw, _base(raw, member.facts)
        facts = member.facts
        if facts is None or facts.start_ticks != ticks or facts.state in ("Z", "X"):
            self._forget(pid)
            return None
        if pid in wants.suspects or facts.state in ("t", "T"):
            facts = self._thorough(facts, member, wants)
        elif facts.tracer_pid or facts.thread_facts:
            facts = replace(facts, tracer_pid=0, thread_facts={})
        if pid in wants.lanes:
            facts = self._with_tids(facts, member, wants)
        if wants.io or pid in wants.suspects:
            facts = self._with_io(facts, member, wants.now_ns)
        member.facts = facts
        return facts

    def _open(self, pid: int) -> int:
        if len(self._known) >= MAX_OPEN:
            return -1
        try:
            return os.open(f"{self._proc}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return -1

    def _read(self, pid: int, member: _Member) -> bytes:
        """The stat line; b'' when the process is gone. An open file never shows a reused pid."""
        try:
            if member.fd >= 0:
                return os.pread(member.fd, 2048, 0)
            with open(f"{self._proc}/{pid}/stat", "rb", buffering=0) as file:
                return file.read(2048)
        except OSError:
            return b""

    def _with_tids(self, facts: ProcFacts, member: _Member, wants: Wants) -> ProcFacts:
        known = facts.tids
        # Threads that just beat are there: only for the others must the list be young.
        stale = wants.fresh or (
            wants.now_ns - member.tids_ns >= REFRESH_NS and facts.pid not in wants.lively
        )
        # A lane whose thread we do not know is either new or gone: only the list can tell.
        if not stale and known is not None and known.issuperset(wants.lanes[facts.pid]):
            return facts
        tids = procfs.tids(facts.pid, self._proc)
        member.tids_ns = wants.now_ns
        return facts if tids == known else replace(facts, tids=tids or None)

    def _with_io(self, facts: ProcFacts, member: _Member, now_ns: int) -> ProcFacts:
        if now_ns - member.io_ns < REFRESH_NS:
            return facts
        member.io_ns = now_ns
        read, written = _io(facts.pid, self._proc)
        return replace(facts, read_bytes=read, written_bytes=written)

    def _thorough(self, facts: ProcFacts, member: _Member, wants: Wants) -> ProcFacts:
        tracer = procfs.tracer_pid(facts.pid, self._proc)
        if tracer != facts.tracer_pid:
            facts = replace(facts, tracer_pid=tracer)
        if not wants.fresh and wants.now_ns - member.threads_ns < REFRESH_NS:
            return facts
        member.threads_ns = wants.now_ns
        first = list(wants.lanes.get(facts.pid, ()))
        rest = sorted(procfs.tids(facts.pid, self._proc).difference(first))
        chosen = [*first, *rest][:MAX_THREADS]
        threads = {tid: t for tid in chosen if (t := self._thread(facts.pid, tid)) is not None}
        return replace(facts, thread_facts=threads)

    def _thread(self, pid: int, tid: int) -> ThreadFacts | None:
        stat = procfs.thread_stat(pid, tid, self._proc)
        if stat is None:
            return None
        return ThreadFacts(tid, stat.state, stat.cpu_ticks, procfs.wchan(pid, tid, self._proc))


def _base(raw: bytes, old: ProcFacts | None) -> ProcFacts | None:
    """Facts of one stat line; what the line does not hold is carried over from the last look."""
    stat = procfs.parse_stat(raw)
    if stat is None:
        return None
    same = old is not None and old.start_ticks == stat.start_ticks
    return ProcFacts(
        pid=stat.pid,
        start_ticks=stat.start_ticks,
        ppid=stat.ppid,
        comm=stat.comm,
        state=stat.state,
        cpu_ticks=stat.cpu_ticks,
        child_ticks=stat.child_ticks,
        rss_pages=stat.rss_pages,
        threads=stat.threads,
        tracer_pid=old.tracer_pid if old and same else 0,
        read_bytes=old.read_bytes if old and same else None,
        written_bytes=old.written_bytes if old and same else None,
        # A changed thread count makes the list unknown, so that it is read at this very look.
        tids=old.tids if old and same and old.threads == stat.threads else None,
        thread_facts=old.thread_facts if old and same else {},
        minor_faults=stat.minor_faults,
        major_faults=stat.major_faults,
    )


def _io(pid: int, proc: Path) -> tuple[int | None, int | None]:
    """(rchar, wchar), or Nones without the right to read them."""
    try:
        with open(f"{proc}/{pid}/io", "rb", buffering=0) as file:
            pairs = (line.split() for line in file.read(4096).splitlines())
            values = {p[0]: int(p[1]) for p in pairs if len(p) == 2 and p[1].isdigit()}
    except OSError:
        return None, None
    return values.get(b"rchar:"), values.get(b"wchar:")
