"""Verdicts on real processes: real /proc facts, real py-spy dumps, no engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from stallwatch import procfs
from stallwatch.board.image import BoardImage, LaneClass, LaneImage, PhaseFrame, ProcessImage
from stallwatch.clock import SystemClock
from stallwatch.diagnosis.classify import diagnose, refine
from stallwatch.diagnosis.kinds import Kind
from stallwatch.diagnosis.verdict import Case, Verdict
from stallwatch.evidence.ladder import Ladder
from stallwatch.evidence.model import ProcessEvidence, Rung, Target
from stallwatch.evidence.pyspy import PySpy, parse_dump
from stallwatch.evidence.tool import ToolRegistry
from stallwatch.lifecycle.states import State
from stallwatch.watch.finding import Finding, Level, Rule, Subject
from stallwatch.watch.snapshot import EngineFacts, Exit, ProcFacts, Snapshot, ThreadFacts

pytestmark = [pytest.mark.process, pytest.mark.slow]

PYSPY = os.path.join(os.path.dirname(sys.executable), "py-spy")
SOURCE = """
import ctypes, queue, re, sys, threading, time

def run_kernel():
    libc, semaphore = ctypes.CDLL(None), (ctypes.c_char * 64)()
    libc.sem_init(semaphore, 0, 0)
    libc.sem_wait(semaphore)

def hold_gil():
    ctypes.PyDLL(None).pause()

def hold_gil_elsewhere():
    threading.Thread(target=hold_gil, name="helper", daemon=True).start()
    run_kernel()

def spin():
    while True:
        pass

def regex():
    re.match("(a+)+$", "a" * 60 + "b")

def sleeper():
    time.sleep(600)

def lock_waiter():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def queue_waiter():
    queue.Queue().get()

print("ready", flush=True)
globals()[sys.argv[1]]()
"""


class Victim:
    """A small process that does one thing for ever, seen as worker:0/main or core:0/main."""

    def __init__(self, script: Path, what: str) -> None:
        self.child = subprocess.Popen(
            [sys.executable, str(script), what], stdout=subprocess.PIPE, text=True
        )
        assert self.child.stdout is not None
        assert self.child.stdout.readline() == "ready\n"
        self.pid = self.child.pid
        self.ticks = procfs.start_ticks(self.pid) or 0
        self.began_ns = time.monotonic_ns()

    def look(self, role: str, phase: str, *, exits: tuple[Exit, ...] = ()) -> Snapshot:
        at = self.began_ns - 61 * 10**9
        lane = LaneImage(
            0, self.pid, self.pid, self.ticks, role, 0, "main", channel=False,
            stack=(PhaseFrame(phase, LaneClass.WORK, at, at, 0),), beats=1, work=1, wait_on="",
        )  # fmt: skip
        process = ProcessImage(0, self.pid, self.ticks, role, 0, True, 1, at)
        return Snapshot(
            now_ns=time.monotonic_ns(),
            engine=EngineFacts("chat", 1, State.READY, ready_ns=at),
            image=BoardImage(1, time.monotonic_ns(), (process,), (lane,)),
            processes=self.facts(),
            exits=exits,
        )

    def facts(self) -> dict[int, ProcFacts]:
        stat = procfs.stat(self.pid)
        if stat is None or stat.state == "Z":
            return {}
        threads = {
            tid: ThreadFacts(tid, t.state, t.cpu_ticks, procfs.wchan(self.pid, tid))
            for tid in procfs.tids(self.pid)
            if (t := procfs.thread_stat(self.pid, tid)) is not None
        }
        return {
            self.pid: ProcFacts(
                self.pid, stat.start_ticks, stat.ppid, stat.comm, stat.state, stat.cpu_ticks,
                stat.child_ticks, stat.rss_pages, stat.threads,
                tracer_pid=procfs.tracer_pid(self.pid), tids=frozenset(threads),
                thread_facts=threads,
            )
        }  # fmt: skip

    def dump(self, mode: str = "--nonblocking") -> dict[int, ProcessEvidence]:
        threads = {
            tid: {"state": t.state, "cpu_ticks": str(t.cpu_ticks)}
            for tid in procfs.tids(self.pid)
            if (t := procfs.thread_stat(self.pid, tid)) is not None
        }
        taken = time.monotonic_ns()
        done = subprocess.run(
            [PYSPY, "dump", "--json", mode, "--pid", str(self.pid)],
            capture_output=True, timeout=20, check=False,
        )  # fmt: skip
        stacks, problem = parse_dump(done.stdout)
        assert stacks, problem + done.stderr.decode()
        rung = Rung.NATIVE if mode == "--native" else Rung.PYSPY
        target = Target(self.pid, self.ticks)
        return {self.pid: ProcessEvidence(target, rung, stacks, {}, threads, (), taken)}

    def refined(self, *, native: bool = True) -> tuple[Verdict, Verdict]:
        """The first verdict and the final one, with the sets that the real ladder returns."""
        clock, registry = SystemClock(), ToolRegistry()
        ladder = Ladder(clock, registry, pyspy=PySpy(registry, path=PYSPY))
        target = Target(self.pid, self.ticks, "worker", 0)
        before = self.look("worker", "execute_model")
        wait_until(lambda: time.monotonic_ns() - before.now_ns > 700_000_000)
        case = self.case(before, ladder.first([target], deadline_s=5.0))
        sets = ladder.more([target], case.stacks, deadline_s=15, native=True, samples=1, gap_s=0.1)
        if not native:
            refused = replace(sets[0][self.pid], rung=Rung.PROC, threads=(), problems=("refused",))
            sets[0] = {self.pid: refused}
        first = diagnose(case)
        return first, refine(first, diagnose(replace(case, later=tuple(sets))))

    def case(self, before: Snapshot, stacks: Mapping[int, ProcessEvidence]) -> Case:
        snapshot = self.look("worker", "execute_model")
        at = self.began_ns - 61 * 10**9
        subject = Subject(
            "worker:0",
            "worker",
            0,
            self.pid,
            self.ticks,
            self.pid,
            "worker:0/main",
            "execute_model",
        )
        elapsed = snapshot.now_ns - at
        found = Finding(
            Rule.PHASE_OVER_LIMIT, Level.OVER, subject, at, elapsed, 60 * 10**9, "k", ()
        )
        return Case(found, (found,), before, snapshot, stacks)

    def judge(
        self, role: str = "worker", phase: str = "execute_model", *, native: bool = False
    ) -> Verdict:
        """Two looks 0.7 s apart and three sets of stacks, as the daemon takes them."""
        before = self.look(role, phase)
        stacks = self.dump()
        wait_until(lambda: time.monotonic_ns() - before.now_ns > 700_000_000)
        snapshot = self.look(role, phase)
        modes = ["--nonblocking", "--native" if native else "--nonblocking"]
        later = tuple(self.dump(mode) for mode in modes)
        at = self.began_ns - 61 * 10**9
        subject = Subject(
            f"{role}:0", role, 0, self.pid, self.ticks, self.pid, f"{role}:0/main", phase
        )
        finding = Finding(
            Rule.PHASE_OVER_LIMIT,
            Level.OVER,
            subject,
            at,
            snapshot.now_ns - at,
            60 * 10**9,
            "k",
            (),
        )
        return diagnose(
            Case(finding, (finding,), before, snapshot, stacks, later, self.look(role, phase))
        )


def wait_until(ready: Callable[[], bool], timeout_s: float = 10) -> None:
    """Poll with a deadline."""
    until = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.01)


SLEEPS_IN = {
    "run_kernel": "futex",
    "lock_waiter": "futex",
    "queue_waiter": "futex",
    "hold_gil": "pause",
    "hold_gil_elsewhere": "pause",
    "sleeper": "nanosleep",
}


def wchans(pid: int) -> list[str]:
    return [procfs.wchan(pid, tid) for tid in procfs.tids(pid)]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Victim]]:
    script = tmp_path / "victim.py"
    script.write_text(SOURCE)
    victims: list[Victim] = []

    def make(what: str) -> Victim:
        victim = Victim(script, what)
        victims.append(victim)
        # "ready" is printed before the call: wait until it is really in it.
        if what in SLEEPS_IN:
            wait_until(lambda: any(SLEEPS_IN[what] in w for w in wchans(victim.pid)))
        else:
            wait_until(lambda: (t := procfs.stat(victim.pid)) is not None and t.cpu_ticks > 10)
        return victim

    yield make
    for victim in victims:
        victim.child.kill()
        victim.child.wait(10)
        assert victim.child.stdout is not None
        victim.child.stdout.close()


@pytest.mark.parametrize("what", ["run_kernel", "lock_waiter"])
def test_a_c_call_and_a_lock_look_the_same_at_first(
    start: Callable[..., Victim], what: str
) -> None:
    """sem_wait through ctypes and a raw lock, no native frames: UNKNOWN_STALL, with the frame."""
    verdict = start(what).judge()
    assert (verdict.kind, verdict.confidence) == (Kind.UNKNOWN_STALL, "low"), verdict
    assert verdict.kinds == (Kind.UNKNOWN_STALL, Kind.DEVICE_WAIT)
    assert verdict.culprit.frame.startswith(f"{what} (victim.py:")
    assert verdict.culprit.thread == "MainThread"


def test_the_rest_of_the_evidence_names_a_c_call(start: Callable[..., Victim]) -> None:
    """sem_wait, refined by what Ladder.more() returns: DEVICE_WAIT, high."""
    first, final = start("run_kernel").refined()
    assert first.kind is Kind.UNKNOWN_STALL, first
    assert (final.kind, final.confidence) == (Kind.DEVICE_WAIT, "high"), final
    assert final.culprit.frame == "run_kernel (victim.py:7)"


def test_the_rest_of_the_evidence_names_the_lock(start: Callable[..., Victim]) -> None:
    """A raw lock, refined the same way: UNKNOWN_STALL still, and the reason says that it is a lock."""
    first, final = start("lock_waiter").refined()
    assert (first.kind, final.kind) == (Kind.UNKNOWN_STALL, Kind.UNKNOWN_STALL), final
    assert any("waits for a lock" in r for r in final.reasons), final
    assert Kind.DEVICE_WAIT not in final.kinds


def test_a_refused_native_look_changes_nothing(start: Callable[..., Victim]) -> None:
    """An entry with rung PROC and no threads among the later sets is no stack: no name, same frame."""
    first, final = start("run_kernel").refined(native=False)
    assert (first.kind, final.kind) == (Kind.UNKNOWN_STALL, Kind.UNKNOWN_STALL), final
    assert final.culprit == first.culprit


def test_the_same_c_call_in_the_scheduler_is_unknown(start: Callable[..., Victim]) -> None:
    """EngineCore's schedule phase waits for no device."""
    assert start("run_kernel").judge("core", "schedule").kind is Kind.UNKNOWN_STALL


@pytest.mark.parametrize(("role", "phase"), [("worker", "execute_model"), ("core", "schedule")])
def test_a_c_call_that_keeps_the_gil(start: Callable[..., Victim], role: str, phase: str) -> None:
    """pause() through ctypes.PyDLL: GIL_HELD in any process, high, with the frame of the holder."""
    verdict = start("hold_gil").judge(role, phase)
    assert (verdict.kind, verdict.confidence) == (Kind.GIL_HELD, "high"), verdict
    assert verdict.culprit.frame == "hold_gil (victim.py:10)"


def test_another_thread_that_keeps_the_gil(start: Callable[..., Victim]) -> None:
    """The lane's thread waits for the GIL; the helper that owns it asleep is shown."""
    verdict = start("hold_gil_elsewhere").judge()
    assert verdict.kind is Kind.GIL_HELD, verdict
    assert verdict.culprit.thread == "helper"
    assert verdict.culprit.frame.startswith("hold_gil (")


@pytest.mark.parametrize("what", ["spin", "regex"])
def test_endless_computation(start: Callable[..., Victim], what: str) -> None:
    """A Python loop and a catastrophic regular expression burn a core: CPU_RUNAWAY, even if starved."""
    verdict = start(what).judge("core", "schedule")
    assert verdict.kind is Kind.CPU_RUNAWAY, verdict
    assert verdict.culprit.frame.startswith(("spin (victim.py", "match (re/"))


@pytest.mark.parametrize(
    ("what", "said"), [("sleeper", "a timed sleep"), ("queue_waiter", "a queue")]
)
def test_waits_by_design(start: Callable[..., Victim], what: str, said: str) -> None:
    """time.sleep and Queue.get in a device phase stay UNKNOWN_STALL and say what they wait for."""
    verdict = start(what).judge()
    assert verdict.kind is Kind.UNKNOWN_STALL, verdict
    assert any(said in r for r in verdict.reasons)
    assert verdict.culprit.frame.startswith(f"{what} (victim.py:")


@pytest.mark.parametrize("what", ["run_kernel", "hold_gil"])
def test_a_stopped_process(start: Callable[..., Victim], what: str) -> None:
    """SIGSTOP: PROCESS_STOPPED, though its stack is that of a device wait or of a GIL holder."""
    victim = start(what)
    os.kill(victim.pid, signal.SIGSTOP)
    wait_until(lambda: (s := procfs.stat(victim.pid)) is not None and s.state == "T")
    verdict = victim.judge()
    assert (verdict.kind, verdict.confidence) == (Kind.PROCESS_STOPPED, "high"), verdict


def test_a_killed_process_names_its_last_phase(start: Callable[..., Victim]) -> None:
    """SIGKILL: CHILD_DIED with the signal and the phase at death, and no frame."""
    victim = start("run_kernel")
    before = victim.look("worker", "execute_model")
    victim.child.kill()
    code = victim.child.wait(10)
    ended = Exit(victim.pid, victim.ticks, time.monotonic_ns(), root=False, signal=-code)
    snapshot = victim.look("worker", "execute_model", exits=(ended,))
    subject = Subject("worker:0", "worker", 0, victim.pid, victim.ticks)
    finding = Finding(Rule.PROCESS_GONE, Level.OVER, subject, ended.at_ns, 0, 0, "k", ())
    verdict = diagnose(Case(finding, (finding,), before, snapshot))
    assert (verdict.kind, verdict.confidence) == (Kind.CHILD_DIED, "high")
    assert (verdict.culprit.phase, verdict.culprit.frame) == ("execute_model", "")
    assert "signal 9" in verdict.summary
