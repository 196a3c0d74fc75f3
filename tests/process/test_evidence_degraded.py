"""py-spy missing, refused or hanging, on targets in every state: the next rung is used and said so.

And whatever was tried, the target is in the state in which it was found.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from evidence_targets import process, target_of, wait_state, without_ptrace
from stallwatch import procfs
from stallwatch.clock import SystemClock
from stallwatch.evidence.ladder import Ladder
from stallwatch.evidence.model import Rung
from stallwatch.evidence.pyspy import PySpy
from stallwatch.evidence.tool import ToolRegistry

pytestmark = [pytest.mark.process, pytest.mark.slow]

STATES = [("idle", "", "S"), ("gil", "", "S"), ("idle", "T", "T"), ("dstate", "", "D")]
# A tool that stops its target, as a blocking py-spy does, and then never answers or dies.
STOPS = "os.kill(int(sys.argv[-1]), signal.SIGSTOP); "
TOOLS: dict[str, tuple[str | None, str]] = {
    "missing": (None, "pip install py-spy"),
    "hanging": ("signal.signal(15, signal.SIG_IGN); time.sleep(600)", "did not finish within"),
    "refused": (
        "sys.stderr.write('Error: Permission Denied: Try running again with sudo'); sys.exit(1)",
        "CAP_SYS_PTRACE",
    ),
    "nonsense": ("print('{]')", "py-spy"),
    "crashing": ("os.kill(os.getpid(), signal.SIGSEGV)", ""),
}


@pytest.fixture
def tool(tmp_path) -> Callable[[str | None], str]:
    """A stand-in for py-spy with that body; '' for none at all."""

    def make(body: str | None) -> str:
        if body is None:
            return ""
        path = tmp_path / "py-spy"
        path.write_text(f"#!{sys.executable} -S\nimport os, signal, sys, time\n{body}\n")
        path.chmod(0o700)
        return str(path)

    return make


def collected(path: str, child: object, run: Path | None = None) -> tuple[Rung, list[str], str]:
    """Best rung, all problems, and the state of the main thread after `first` and `more`."""
    registry = ToolRegistry()
    ladder = Ladder(SystemClock(), registry, run_folder=run, pyspy=PySpy(registry, path=path))
    target = target_of(child, run=run)  # type: ignore[arg-type]
    first = ladder.first([target], deadline_s=0.8)
    sets = [first, *ladder.more([target], first, deadline_s=3.0, samples=1, gap_s=0.01)]
    found = [s[target.pid] for s in sets if target.pid in s]
    after = procfs.stat(target.pid)
    assert after is not None
    return found[0].rung, [p for e in found for p in e.problems], after.state


@pytest.mark.parametrize("what", list(TOOLS))
@pytest.mark.parametrize("target", STATES)
def test_the_proc_rung_is_used_and_said(tool, what, target):
    """No dump signal declared: /proc facts, the reason in words, and the state untouched."""
    body, says = TOOLS[what]
    kind, state, seen = target
    with process(kind, state=state) as child:
        began = time.monotonic()
        rung, problems, after = collected(tool(body), child)
        assert time.monotonic() - began < 6.0
        assert rung is Rung.PROC
        assert any(says in problem for problem in problems), problems
        assert after == seen


@pytest.mark.parametrize("what", ["missing", "hanging", "refused"])
def test_faulthandler_is_used_where_it_is_declared(tool, tmp_path, what):
    """The process's own handler gives the stacks when py-spy gives none, and the report has both."""
    body, says = TOOLS[what]
    with process("dumpable", str(tmp_path)) as child:
        rung, problems, after = collected(tool(body), child, tmp_path)
        assert rung is Rung.FAULTHANDLER
        assert any(says in problem for problem in problems)
        assert after == "S"


@pytest.mark.parametrize("end", ["sys.exit(1)", "time.sleep(600)", "print('[]')"])
def test_a_blocking_tool_never_leaves_its_target_stopped(tool, end):
    """It stopped the target and failed, hung or lied: SIGCONT is sent, and the note says so."""
    with process("idle") as child:
        path = tool(STOPS + end)
        dump = PySpy(ToolRegistry(), path=path).dump(target_of(child), deadline_s=0.5, native=True)
        assert "left the process stopped: SIGCONT was sent" in dump.note
        wait_state(child.pid, "S")
        assert int(procfs.status(child.pid)["ShdPnd"], 16) == 0


def test_an_operators_stop_survives_every_tool(tool):
    """State T before: a tool that hangs on it does not get the process continued."""
    with process("idle", state="T") as child:
        _, _, after = collected(tool(TOOLS["hanging"][0]), child)
        assert after == "T"
        os.kill(child.pid, signal.SIGCONT)
        wait_state(child.pid, "S")


REAL = """
import json, sys
from stallwatch.clock import SystemClock
from stallwatch.evidence.ladder import Ladder
from stallwatch.evidence.model import Target
from stallwatch.evidence.tool import ToolRegistry
target = Target(int(sys.argv[1]), int(sys.argv[2]), "worker", 0)
ladder = Ladder(SystemClock(), ToolRegistry())
first = ladder.first([target])
ladder.more([target], first, deadline_s=3.0, samples=1, gap_s=0.01)
found = first[target.pid]
print(json.dumps([str(found.rung), found.problems, dict(found.facts)]))
"""


@pytest.mark.parametrize(("kind", "state", "seen"), STATES)
def test_the_real_py_spy_without_ptrace_rights(kind, state, seen):
    """The real tool without CAP_SYS_PTRACE, on each state: refused in words, state untouched."""
    with process(kind, state=state) as child:
        found = target_of(child)
        out = without_ptrace(REAL, str(found.pid), str(found.start_ticks))
        rung, problems, facts = json.loads(out)
        assert rung == "proc"
        assert any("CAP_SYS_PTRACE" in problem for problem in problems), problems
        assert facts["state"] == seen
        after = procfs.stat(found.pid)
        assert after is not None
        assert after.state == seen
