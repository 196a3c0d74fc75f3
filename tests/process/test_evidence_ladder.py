"""The ladder on real processes: each state reaches its rung, in parallel, in bounded time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time

import pytest

from evidence_targets import process, target_of, wait_state, without_ptrace
from stallwatch import procfs
from stallwatch.clock import SystemClock
from stallwatch.evidence.ladder import Ladder
from stallwatch.evidence.ledger import Ledger
from stallwatch.evidence.model import ProcessEvidence, Rung, Target
from stallwatch.evidence.pyspy import PySpy, locate
from stallwatch.evidence.report import live
from stallwatch.evidence.tool import ToolRegistry

pytestmark = [pytest.mark.process, pytest.mark.slow]


def ladder(run_folder=None, pyspy: str | None = None) -> Ladder:
    registry = ToolRegistry()
    return Ladder(SystemClock(), registry, run_folder=run_folder, pyspy=PySpy(registry, path=pyspy))


def fake(tmp_path, body: str) -> str:
    path = tmp_path / "py-spy"
    path.write_text(f"#!{sys.executable} -S\nimport os, signal, sys, time\n{body}\n")
    path.chmod(0o700)
    return str(path)


def names(evidence: ProcessEvidence) -> set[str]:
    return {frame.name for thread in evidence.threads for frame in thread.frames}


@pytest.mark.parametrize(
    ("kind", "state", "frame", "seen"),
    [("gil", "", "hold", "S"), ("idle", "T", "wait_for_work", "T"), ("dstate", "", "stuck", "D")],
)
def test_first_reaches_the_stack_in_every_state(kind, state, frame, seen):
    """GIL held in C, stopped, and in D state: the first look has the stack and the state."""
    with process(kind, state=state) as child:
        found = target_of(child)
        evidence = ladder().first([found], deadline_s=5)[found.pid]
        assert evidence.rung is Rung.PYSPY
        assert frame in names(evidence)
        assert evidence.facts["state"] == seen
        assert evidence.thread_facts[found.pid]["state"] == seen
        assert evidence.problems == ()


def test_native_is_not_tried_on_stopped_or_d_state_and_says_why():
    """A blocking tool on T or D would fail or hang for ever: refused in words, at once."""
    with process("dstate") as stuck, process("idle", state="T") as stopped:
        targets = [target_of(stuck), target_of(stopped, rank=1)]
        one = ladder()
        first = one.first(targets, deadline_s=5)
        began = time.monotonic()
        (native,) = one.more(targets, first, samples=0)
        assert time.monotonic() - began < 2
        for found, state in zip(targets, "DT", strict=True):
            assert native[found.pid].rung is Rung.PROC
            assert f"is in state {state}" in native[found.pid].problems[0]


def test_eight_processes_are_on_disk_within_two_seconds(tmp_path):
    """All stacks of an engine of 8, mixed states, are in the ledger within 2 s of asking."""
    with contextlib.ExitStack() as stack:
        kinds = [("gil", ""), ("idle", "T"), ("dstate", ""), *[("idle", "")] * 5]
        children = [stack.enter_context(process(k, state=s)) for k, s in kinds]
        targets = [target_of(child, rank=rank) for rank, child in enumerate(children)]
        ledger = Ledger(tmp_path)
        stack.callback(ledger.close)
        one = ladder()
        began = time.monotonic()
        found = one.first(targets)
        stall = ledger.new_id(time.time())
        kept = ledger.insert({"id": stall, "engine": "e", "kind": "UNKNOWN_STALL", **live(found)})
        took = time.monotonic() - began
        assert kept == ""
        assert took <= 2.0
        assert {e.rung for e in found.values()} == {Rung.PYSPY}
        assert len(ledger.get(stall)["stacks"]) == 8


def test_without_py_spy_the_rung_is_proc_and_says_so():
    """py-spy missing: /proc facts of process and threads, and the sentence that names the fix."""
    with process("idle") as child:
        found = target_of(child)
        evidence = ladder(pyspy="").first([found])[found.pid]
        assert evidence.rung is Rung.PROC
        assert "pip install py-spy" in evidence.problems[0]
        assert evidence.facts["wchan"]
        assert len(evidence.thread_facts) == 2


def test_faulthandler_is_the_next_rung(tmp_path):
    """py-spy missing and a dump signal declared: the process's own handler gives the stacks."""
    with process("dumpable", str(tmp_path)) as child:
        found = target_of(child, run=tmp_path)
        evidence = ladder(tmp_path, pyspy="").first([found])[found.pid]
        assert evidence.rung is Rung.FAULTHANDLER
        assert "wait_for_work" in names(evidence)
        assert all(t.name.startswith("pthread 0x") and t.tid == 0 for t in evidence.threads)


REFUSED = """
import json, pathlib, sys
from stallwatch.clock import SystemClock
from stallwatch.evidence.ladder import Ladder
from stallwatch.evidence.model import Target
from stallwatch.evidence.tool import ToolRegistry
pid, ticks, signal, run = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
target = Target(pid, ticks, "worker", 0, signal, run + "/dump")
found = Ladder(SystemClock(), ToolRegistry(), run_folder=pathlib.Path(run)).first([target])[pid]
frames = [f.name for t in found.threads for f in t.frames]
print(json.dumps([str(found.rung), frames, found.problems, dict(found.facts)]))
"""


@pytest.mark.parametrize("number", [0, int(signal.SIGURG)])
def test_refused_ptrace_falls_to_the_next_rung(tmp_path, number):
    """No CAP_SYS_PTRACE: faulthandler if declared, else /proc, and the refusal is in the report."""
    with process("dumpable", str(tmp_path)) as child:
        found = target_of(child)
        out = without_ptrace(
            REFUSED, str(found.pid), str(found.start_ticks), str(number), str(tmp_path)
        )
        rung, frames, problems, facts = json.loads(out)
        assert rung == ("faulthandler" if number else "proc")
        assert ("wait_for_work" in frames) == bool(number)
        assert any("CAP_SYS_PTRACE" in problem for problem in problems)
        assert facts["state"] == "S"


def test_an_undumpable_process_is_proc_only_without_the_capability(tmp_path):
    """PR_SET_DUMPABLE 0 and no CAP_SYS_PTRACE: no stack, the refusal, and still its state."""
    with process("undumpable") as child:
        found = target_of(child)
        out = without_ptrace(REFUSED, str(found.pid), str(found.start_ticks), "0", str(tmp_path))
        rung, frames, problems, facts = json.loads(out)
        assert (rung, frames, facts["state"]) == ("proc", [], "S")
        assert any("refused" in problem for problem in problems)


def test_a_hanging_py_spy_costs_the_cap_and_no_more(tmp_path):
    """py-spy that hangs and ignores SIGTERM: 8 processes still answer in about 1 s, by /proc."""
    calls = tmp_path / "calls"
    body = (
        f"open({str(calls)!r}, 'a').write('x'); signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    )
    path = fake(tmp_path, body)
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(process("idle")) for _ in range(8)]
        targets = [target_of(child, rank=rank) for rank, child in enumerate(children)]
        one = ladder(pyspy=path)
        began = time.monotonic()
        found = one.first(targets)
        assert time.monotonic() - began < 1.6
        assert {e.rung for e in found.values()} == {Rung.PROC}
        assert all("did not finish" in e.problems[0] for e in found.values())
        # One longer try, because it was late and not refused; then /proc only, and no native.
        calls.unlink()
        began = time.monotonic()
        sets = one.more(targets, found, deadline_s=2.5, samples=2, gap_s=0.05)
        assert time.monotonic() - began < 3
        assert [{e.rung for e in s.values()} for s in sets] == [{Rung.PROC}] * 3
        assert not any(e.problems for s in sets[1:] for e in s.values())
        assert calls.stat().st_size == 8


def test_a_py_spy_that_was_only_late_gets_one_longer_try(tmp_path):
    """On a loaded host the first stack may miss the cap: `more` brings it, before the samples."""
    mark = tmp_path / "called"
    body = (
        f"if not os.path.exists({str(mark)!r}): open({str(mark)!r}, 'w'); time.sleep(600)\n"
        f"time.sleep(0.5); os.execv({locate()!r}, ['py-spy', *sys.argv[1:]])"
    )
    with process("idle") as child:
        found = target_of(child)
        one = ladder(pyspy=fake(tmp_path, body))
        first = one.first([found], deadline_s=0.4)
        assert first[found.pid].rung is Rung.PROC
        late, sample = one.more([found], first, samples=1, gap_s=0.01)
        assert late[found.pid].rung is Rung.PYSPY
        assert sample[found.pid].rung is Rung.PYSPY
        assert "wait_for_work" in names(late[found.pid])


def test_a_second_collection_at_the_same_time_is_refused_in_words(tmp_path):
    """While one collection runs, another gets an answer at once, and starts no tool."""
    mark = tmp_path / "started"
    body = f"open({str(mark)!r}, 'a').write('x'); time.sleep(600)"
    with process("idle") as child:
        found = target_of(child)
        one = ladder(pyspy=fake(tmp_path, body))
        thread = threading.Thread(target=one.first, args=([found],), kwargs={"deadline_s": 3})
        thread.start()
        until = time.monotonic() + 2.5
        while not mark.exists() and time.monotonic() < until:
            threading.Event().wait(0.005)
        began = time.monotonic()
        refused = one.first([found])
        more = one.more([found], refused)
        assert time.monotonic() - began < 0.5
        assert refused[found.pid].rung is Rung.NONE
        assert "still running" in refused[found.pid].problems[0]
        assert more == []
        thread.join(10)
        assert mark.read_text() == "x"


def test_a_new_case_does_not_wait_for_the_samples_of_an_old_one():
    """`first` ends the gaps of a running `more`, and has its stacks within its own time."""
    with process("idle") as child:
        found = target_of(child)
        one = ladder()
        begun = one.first([found], deadline_s=10)
        done: list[object] = []
        options = {"native": False, "samples": 5, "gap_s": 3.0}
        old = threading.Thread(
            target=lambda: done.append(one.more([found], begun, **options)), daemon=True
        )
        old.start()
        until = time.monotonic() + 5
        while not one._busy.locked() and time.monotonic() < until:
            threading.Event().wait(0.002)
        again = one.first([found], deadline_s=10)[found.pid]
        assert again.rung is Rung.PYSPY
        assert "wait_for_work" in names(again)
        old.join(5)
        assert done == [[]]


def test_samples_tell_a_runaway(tmp_path):
    """Two further samples, apart by the gap, show the CPU ticks of a spinning thread growing."""
    with process("spin") as child:
        found = target_of(child)
        one = ladder()
        first = one.first([found], deadline_s=10)
        began = time.monotonic()
        sets = one.more([found], first, native=False, samples=2, gap_s=0.4)
        assert time.monotonic() - began >= 0.8
        looks = [first, *sets]
        ticks = [int(look[found.pid].thread_facts[found.pid]["cpu_ticks"]) for look in looks]
        assert len(ticks) == 3
        assert ticks[0] < ticks[1] < ticks[2]
        assert all("spin" in names(look[found.pid]) for look in looks)


def test_native_comes_first_and_leaves_the_target_running():
    """`more` gives native frames of a healthy process before its samples; it is not left stopped."""
    with process("idle") as child:
        found = target_of(child)
        one = ladder()
        first = one.first([found], deadline_s=10)
        native, sample = one.more([found], first, samples=1, gap_s=0.05)
        assert native[found.pid].rung is Rung.NATIVE
        assert sample[found.pid].rung is Rung.PYSPY
        wait_state(found.pid, "S")


def test_cancel_ends_the_gaps():
    """A supervisor that is asked to stop does not wait for samples that are still due."""
    with process("idle") as child:
        found = target_of(child)
        one = ladder()
        first = one.first([found], deadline_s=10)
        timer = threading.Timer(0.2, one.cancel)
        timer.start()
        began = time.monotonic()
        sets = one.more([found], first, native=False, samples=5, gap_s=2.0)
        assert time.monotonic() - began < 1.5
        assert sets == []
        timer.join()


def test_a_gone_process_and_a_reused_pid_are_left_alone():
    """A pid that is nobody's, or somebody else's by now, is only reported as gone."""
    with process("idle") as child:
        right = target_of(child)
        wrong = Target(right.pid, right.start_ticks + 1, "worker", 0, int(signal.SIGKILL), "/x")
        evidence = ladder().first([wrong])[right.pid]
        assert evidence.rung is Rung.NONE
        assert evidence.problems == ("the process is gone",)
        assert procfs.is_alive(right.pid, right.start_ticks)


def test_a_zombie_keeps_its_facts():
    """An ended process that nobody reaped: state Z, and the sentence that it has no stack."""
    with process("idle") as child:
        found = target_of(child)
        child.kill()
        wait_state(child.pid, "Z")
        evidence = ladder().first([found])[found.pid]
        assert (evidence.rung, evidence.facts["state"]) == (Rung.PROC, "Z")
        assert "zombie" in evidence.problems[0]


def test_a_debugged_process_is_not_stopped_a_second_time():
    """A process traced by somebody else gets a non-blocking stack and no native attempt."""
    with process("idle") as child:
        found = target_of(child)
        tracer = ToolRegistry().start(["strace", "-qq", "-o", "/dev/null", "-p", str(found.pid)])
        try:
            until = time.monotonic() + 10
            while procfs.tracer_pid(found.pid) == 0:
                assert time.monotonic() < until
                threading.Event().wait(0.005)
            one = ladder()
            first = one.first([found], deadline_s=10)
            (native,) = one.more([found], first, samples=0)
        finally:
            tracer.terminate()
            tracer.communicate(timeout=10)
        assert first[found.pid].rung is Rung.PYSPY
        assert f"pid {tracer.pid} traces it" in native[found.pid].problems[0]


def test_no_thread_and_no_tool_is_left(tmp_path):
    """After a look whose tools hung, neither a thread of ours nor a tool lives on."""
    path = fake(tmp_path, "time.sleep(600)")
    registry = ToolRegistry()
    with process("idle") as child:
        one = Ladder(SystemClock(), registry, pyspy=PySpy(registry, path=path))
        one.first([target_of(child)], deadline_s=0.4)
        until = time.monotonic() + 5
        while registry.pids() or any(
            t.name == "stallwatch-evidence" for t in threading.enumerate()
        ):
            assert time.monotonic() < until
            threading.Event().wait(0.005)
    assert os.getpid() not in registry.pids()
