"""py-spy on real processes, and what is done about its refusals and its damage."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest

from evidence_targets import process, target_of, wait_state, without_ptrace
from stallwatch import procfs
from stallwatch.evidence.model import Target
from stallwatch.evidence.pyspy import PySpy, locate, send_signal
from stallwatch.evidence.tool import ToolRegistry

pytestmark = [pytest.mark.process, pytest.mark.slow]


def tool(tmp_path, body: str) -> str:
    """A stand-in for py-spy: a Python script that gets py-spy's arguments."""
    path = tmp_path / "py-spy"
    path.write_text(f"#!{sys.executable} -S\nimport os, signal, sys, time\n{body}\n")
    path.chmod(0o700)
    return str(path)


def names(dump) -> set[str]:
    return {frame.name for thread in dump.threads for frame in thread.frames}


def test_it_is_found_beside_the_interpreter():
    """py-spy of our own environment is found without any PATH."""
    assert os.access(locate(), os.X_OK)


def test_the_holder_of_the_gil_is_named():
    """A thread asleep in C with the GIL shows owns_gil, its name, its kernel thread and frame."""
    with process("gil") as child:
        dump = PySpy(ToolRegistry()).dump(target_of(child), deadline_s=10)
        owners = [t for t in dump.threads if t.owns_gil]
        assert [(t.tid, t.name, t.frames[0].name) for t in owners] == [
            (child.pid, "MainThread", "hold")
        ]
        assert {t.name for t in dump.threads} == {"MainThread", "helper"}
        assert dump.problem == ""


def test_a_stopped_process_gives_its_stack_and_stays_stopped():
    """Non-blocking works on state T and does not continue what somebody else stopped."""
    with process("idle", state="T") as child:
        dump = PySpy(ToolRegistry()).dump(target_of(child), deadline_s=10)
        assert "wait_for_work" in names(dump)
        assert procfs.stat(child.pid).state == "T"


def test_native_frames_of_a_healthy_process():
    """A native dump shows the C frames below the Python ones, and the target runs on."""
    with process("idle") as child:
        dump = PySpy(ToolRegistry()).dump(target_of(child), deadline_s=20, native=True)
        assert "wait_for_work" in names(dump)
        assert any(".so" in f.filename for t in dump.threads for f in t.frames)
        wait_state(child.pid, "S")


def test_a_target_left_stopped_by_the_tool_is_continued(tmp_path):
    """State T after a blocking dump, not T before: SIGCONT is sent, and the report says so."""
    path = tool(tmp_path, "os.kill(int(sys.argv[-1]), signal.SIGSTOP); print('[]')")
    with process("idle") as child:
        dump = PySpy(ToolRegistry(), path=path).dump(target_of(child), deadline_s=10, native=True)
        assert "left the process stopped: SIGCONT was sent" in dump.note
        wait_state(child.pid, "S")


def test_a_target_that_was_stopped_before_is_not_continued(tmp_path):
    """An operator's SIGSTOP is evidence: a blocking dump does not undo it."""
    with process("idle", state="T") as child:
        path = tool(tmp_path, "print('[]')")
        dump = PySpy(ToolRegistry(), path=path).dump(target_of(child), deadline_s=10, native=True)
        assert dump.note == ""
        assert procfs.stat(child.pid).state == "T"


def test_a_hanging_tool_is_said_so(tmp_path):
    """A py-spy that hangs is killed at its deadline and named in the problem."""
    path = tool(tmp_path, "time.sleep(600)")
    with process("idle") as child:
        dump = PySpy(ToolRegistry(), path=path).dump(target_of(child), deadline_s=0.5)
        assert "did not finish within 0.5 s" in dump.problem


def test_a_process_without_python_is_said_so():
    """py-spy on a process without an interpreter ends in a sentence that says that."""
    with process("idle") as child:
        os.kill(child.pid, 0)
        other = ToolRegistry().start(["sleep", "600"])
        try:
            wait_state(other.pid, "S")
            found = Target(other.pid, procfs.start_ticks(other.pid))
            dump = PySpy(ToolRegistry()).dump(found, deadline_s=10)
        finally:
            other.kill()
            other.communicate(timeout=10)
    assert "no Python interpreter that it knows" in dump.problem


def test_a_reused_pid_is_never_touched():
    """Another start time under the same pid is another process: no dump, no signal."""
    with process("idle") as child:
        right = target_of(child)
        wrong = Target(right.pid, right.start_ticks + 1)
        assert PySpy(ToolRegistry()).dump(wrong, deadline_s=10).problem == "the process is gone"
        assert "is gone" in send_signal(wrong, signal.SIGKILL)
        assert procfs.is_alive(right.pid, right.start_ticks)


def test_a_zombie_is_said_so():
    """A process that has ended but was not reaped has no stack, and the sentence says why."""
    with process("idle") as child:
        found = target_of(child)
        child.kill()
        wait_state(child.pid, "Z")
        assert "zombie" in PySpy(ToolRegistry()).dump(found, deadline_s=10).problem


def test_refused_ptrace_is_told_from_a_dead_process():
    """Without CAP_SYS_PTRACE py-spy may say 'not running': we say that ptrace was refused."""
    script = """
import json, sys
from stallwatch.evidence.pyspy import PySpy
from stallwatch.evidence.tool import ToolRegistry
from stallwatch.evidence.model import Target
t = Target(int(sys.argv[1]), int(sys.argv[2]))
print(json.dumps([PySpy(ToolRegistry()).dump(t, deadline_s=10, native=n).problem for n in (0, 1)]))
"""
    with process("idle") as child:
        found = target_of(child)
        problems = json.loads(without_ptrace(script, str(found.pid), str(found.start_ticks)))
        assert all("refused" in problem and "CAP_SYS_PTRACE" in problem for problem in problems)
        wait_state(child.pid, "S")
