"""The judging thread: look, evaluate, observe, tell. Nothing else may run in it.

May live here: reads of /proc and of the boards that return at once, pure functions, a sink that
puts a notice into a queue. May not: stacks or any other child process, SQLite, HTTP, logging that
can block, locks that somebody holds over I/O, imports (an import lock held elsewhere would stop
the watch), anything that waits for an engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from pathlib import Path

from stallwatch import procfs
from stallwatch.clock import Clock, nanoseconds
from stallwatch.errors import StallwatchError, UnknownEngine
from stallwatch.watch.finding import Finding, Level
from stallwatch.watch.host import HostWitness
from stallwatch.watch.looker import Looker
from stallwatch.watch.notice import JudgeFault, Notice
from stallwatch.watch.rules import evaluate
from stallwatch.watch.snapshot import Snapshot
from stallwatch.watch.sources import Host, Sink, WatchedEngine
from stallwatch.watch.tracker import Tracker, observe, rearmed

FAULT_AGAIN_NS = 60_000_000_000  # the same fault is told once a minute


class LookRefused(StallwatchError):
    """The judging thread did not answer in time, or is not running: decide without that look."""


@dataclass(slots=True)
class _Watch:
    """All that the thread keeps of one engine."""

    engine: WatchedEngine
    looker: Looker
    tracker: Tracker = field(default_factory=Tracker)
    latest: Snapshot | None = None  # swapped whole: readers need no lock
    suspects: frozenset[int] = frozenset()
    fresh: bool = False
    again_ns: int = 0  # a second look is due then; 0: none
    fault: str = ""
    fault_ns: int = 0


@dataclass(frozen=True, slots=True)
class _Request:
    name: str
    suspects: frozenset[int]
    answer: Future[Snapshot]


class Judge:
    """Looks at every engine each period and tells the sink what it sees.

    `on_tick` hooks run after each round (the sd_notify watchdog); like the sink they must return
    at once. `turn` is one round without the thread, for tests.
    """

    def __init__(
        self,
        clock: Clock,
        sink: Sink,
        *,
        period_s: float = 0.1,
        host: Host | None = None,
        proc: Path = procfs.PROC,
    ) -> None:
        self._clock = clock
        self._sink = sink
        self._period_ns = nanoseconds(period_s)
        self._host = host or HostWitness(proc=proc)
        self._proc = proc
        self._watches: Mapping[str, _Watch] = {}  # replaced, never changed: the thread reads it
        self._retired: list[_Watch] = []
        self._requests: list[_Request] = []
        self._withdrawn: list[tuple[str, str]] = []  # engine, key of the finding
        self._change = threading.Lock()  # held for list and dict operations only
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._turned_ns = clock.monotonic_ns()
        self._due_ns = self._turned_ns
        self.on_tick: list[Callable[[], None]] = []
        self.looks = 0
        self.late_looks = 0
        self.sink_faults = 0

    def add(self, engine: WatchedEngine) -> None:
        """Watch this engine from the next round on. Replaces one of the same name."""
        looker = Looker(engine, clock=self._clock, host=self._host, proc=self._proc)
        with self._change:
            old = self._watches.get(engine.name)
            self._watches = {**self._watches, engine.name: _Watch(engine, looker)}
            if old is not None:
                self._retired.append(old)
        self.poke()

    def remove(self, name: str) -> None:
        """Stop watching; unknown names are fine."""
        with self._change:
            old = self._watches.get(name)
            self._watches = {n: w for n, w in self._watches.items() if n != name}
            if old is not None:
                self._retired.append(old)
        self.poke()

    def latest(self, name: str) -> Snapshot | None:
        """The last look at an engine, for the operator's views; None before the first."""
        watch = self._watches.get(name)
        return watch.latest if watch else None

    def age_s(self) -> float:
        """Seconds since the last full round: the liveness of this thread."""
        return (self._clock.monotonic_ns() - self._turned_ns) / 1e9

    def poke(self) -> None:
        """Look at all engines now (an exit was reaped); the schedule is kept."""
        self._wake.set()

    def rearm(self, name: str, key: str) -> None:
        """A finding was withdrawn: tell it again if two looks agree again. Returns at once."""
        with self._change:
            self._withdrawn.append((name, key))

    def look_now(
        self, name: str, suspects: Collection[int] = frozenset(), *, timeout_s: float = 1.0
    ) -> Snapshot:
        """A thorough look on behalf of another thread (the third look).

        It is taken by the judging thread, so it races with nothing. Raises UnknownEngine, and
        LookRefused when no answer comes within `timeout_s`.
        """
        if name not in self._watches:
            raise UnknownEngine(f"no engine named {name!r} is watched")
        if self._thread is None or threading.current_thread() is self._thread:
            raise LookRefused("the judging thread is not running", hint="start() it first")
        request = _Request(name, frozenset(suspects), Future())
        with self._change:
            self._requests.append(request)
        self._wake.set()
        try:
            return request.answer.result(timeout_s)
        except FutureTimeout:
            request.answer.cancel()
            raise LookRefused(
                f"no look at {name!r} within {timeout_s:.1f} s",
                hint="The supervisor's own judging thread is late: see /livez?verbose.",
            ) from None

    def start(self) -> None:
        """Start the thread."""
        if self._thread is not None:
            raise RuntimeError("the judge runs already")
        self._stopping = False
        self._due_ns = self._clock.monotonic_ns()
        self._thread = threading.Thread(target=self._run, name="stallwatch-judge", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Ask the thread to end and wait; False when it did not within `timeout_s`."""
        thread = self._thread
        self._stopping = True
        self._wake.set()
        if thread is not None:
            thread.join(timeout_s)
            if thread.is_alive():
                return False
        self._thread = None
        self._answer_requests(refuse=True)
        with self._change:
            watches, self._watches = [*self._retired, *self._watches.values()], {}
            self._retired = []
        for watch in watches:
            watch.looker.close()
        return True

    def turn(self, *, late_ns: int = 0) -> None:
        """One round over all engines. Never raises."""
        if late_ns > self._period_ns:
            self.late_looks += 1
        self._rearm_withdrawn()
        for name, watch in self._watches.items():
            self._judge(name, watch, late_ns)
        with self._change:
            retired, self._retired = self._retired, []
        for watch in retired:
            watch.looker.close()
        self._turned_ns = self._clock.monotonic_ns()
        for hook in self.on_tick:
            try:
                hook()
            except Exception:
                self.sink_faults += 1

    def _rearm_withdrawn(self) -> None:
        with self._change:
            withdrawn, self._withdrawn = self._withdrawn, []
        for name, key in withdrawn:
            watch = self._watches.get(name)
            if watch is not None:
                watch.tracker = rearmed(watch.tracker, key, self._clock.monotonic_ns())

    def _run(self) -> None:
        """The absolute schedule: rounds that were missed are skipped, never made up for."""
        while not self._stopping:
            now = self._clock.monotonic_ns()
            if now >= self._due_ns:
                late = now - self._due_ns
                self._due_ns += self._period_ns * (late // self._period_ns + 1)
                self.turn(late_ns=late)
            self._second_looks()
            self._answer_requests()
            self._sleep()

    def _sleep(self) -> None:
        due = self._due_ns
        for watch in self._watches.values():
            if watch.again_ns:
                due = min(due, watch.again_ns)
        wait_s = (due - self._clock.monotonic_ns()) / 1e9
        if wait_s > 0 and self._wake.wait(wait_s):
            self._wake.clear()
            if not self._stopping and not self._requests:
                self.turn()

    def _second_looks(self) -> None:
        """A fresh suspicion is settled half a period later, not a whole one."""
        now = self._clock.monotonic_ns()
        for name, watch in self._watches.items():
            if watch.again_ns and now >= watch.again_ns:
                self._judge(name, watch, now - watch.again_ns)

    def _judge(self, name: str, watch: _Watch, late_ns: int) -> None:
        """One engine's look. Whatever fails here is told, and the other engines go on."""
        watch.again_ns = 0
        try:
            now = self._clock.monotonic_ns()
            snapshot = watch.looker.look(now, watch.suspects, late_ns=late_ns, fresh=watch.fresh)
            self.looks += 1
            watch.latest = snapshot
            policy = watch.engine.policy()
            findings = evaluate(snapshot, snapshot.now_ns, policy)
            watch.tracker, notices = observe(
                watch.tracker, findings, snapshot, policy, period_ns=self._period_ns
            )
            self._suspect(watch, findings, snapshot)
            if watch.tracker.unconfirmed:
                watch.again_ns = snapshot.now_ns + self._period_ns // 2
            for notice in notices:
                self._tell(name, notice)
            self._fault(name, watch, watch.looker.fault)
        except Exception as error:
            self._fault(name, watch, f"look failed: {error!r}")

    def _suspect(self, watch: _Watch, findings: tuple[Finding, ...], snapshot: Snapshot) -> None:
        """With one suspect all attached processes are looked at: the culprit may be another."""
        if not findings:
            watch.suspects, watch.fresh = frozenset(), False
            return
        pids = {finding.subject.pid for finding in findings}
        if snapshot.image is not None:
            pids.update(process.pid for process in snapshot.image.processes)
        suspects = frozenset(pids)
        over = any(finding.level is Level.OVER for finding in findings)
        watch.fresh = over or not suspects <= watch.suspects
        watch.suspects = suspects

    def _tell(self, name: str, notice: Notice) -> None:
        try:
            self._sink(name, notice)
        except Exception:
            # A broken sink must not stop the watch; the count shows in /livez?verbose.
            self.sink_faults += 1

    def _fault(self, name: str, watch: _Watch, text: str) -> None:
        now = self._clock.monotonic_ns()
        if text and (text != watch.fault or now - watch.fault_ns >= FAULT_AGAIN_NS):
            watch.fault_ns = now
            self._tell(name, JudgeFault(name, text))
        watch.fault = text

    def _answer_requests(self, *, refuse: bool = False) -> None:
        with self._change:
            requests, self._requests = self._requests, []
        for request in requests:
            if not request.answer.set_running_or_notify_cancel():
                continue
            watch = self._watches.get(request.name)
            if watch is None or refuse:
                request.answer.set_exception(LookRefused(f"{request.name!r} is not watched now"))
                continue
            try:
                now = self._clock.monotonic_ns()
                watch.latest = watch.looker.look(now, request.suspects, fresh=True)
                request.answer.set_result(watch.latest)
            except Exception as error:
                request.answer.set_exception(error)
