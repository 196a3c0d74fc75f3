"""As a pod runs it: no root, no capability, no new privileges, and evidence all the same."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon_helpers import ENGINES, Daemon, daemon, place
from deploy_helpers import FILTERED, own, without_rights
from deploy_seccomp import numbers

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is not installed"),
]
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


@pytest.fixture
def folder() -> Iterator[Path]:
    with place() as path:
        own(path)
        yield path


def bare(pid: int) -> dict[str, str]:
    """What /proc says of a process's rights."""
    rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(row.split(":\t", 1) for row in rows if ":\t" in row)


def stalled(run: Daemon) -> dict:
    """One stall of the worker, told to the end; the final report."""
    run.wait_ready()
    for pid in (run.process.pid, *run.members()):
        rights = bare(pid)
        # a normal user has an empty set of everything but the bound, which only root can lower
        sets = ("Eff", "Prm", "Inh", "Amb", *(("Bnd",) if os.geteuid() == 0 else ()))
        assert {rights[f"Cap{x}"].strip("0") for x in sets} == {""}
        assert rights["Uid"].split()[0] != "0"
        assert rights["NoNewPrivs"] == "1"
    (run.folder / "worker.part").write_text("stall")
    (run.folder / "worker.part").rename(run.folder / "worker.order")
    report = run.wait_stall()
    run.wait_ready(2)
    return run.report(report["id"])


def test_stacks_without_root_and_without_any_capability(folder):
    """PR_SET_PTRACER and descent are enough: py-spy names the function that every lane stands in."""
    scope = int(YAMA.read_text()) if YAMA.exists() else 0
    if scope >= 2:
        pytest.skip(f"Yama ptrace_scope {scope} wants CAP_SYS_PTRACE: see the degraded rungs")
    with daemon(folder, before=without_rights(folder)) as run:
        report = stalled(run)
        assert report["culprit"]["lane"] == "worker:0/model"
        assert report["rung"].startswith("py-spy")
        assert report["culprit"]["frame"].startswith(("wait_released", "stuck_in_a_call"))
        assert run.stop() == 0


@pytest.mark.skipif(not numbers(), reason="linux-libc-dev is not installed")
def test_stacks_under_a_profile_that_refuses_tracing_calls(folder):
    """ptrace and process_vm_readv are EPERM, as in a strict runtime: /proc/PID/mem gives the stacks."""
    calls = ("deny", "ptrace,process_vm_readv,process_vm_writev")
    before = [*without_rights(folder), sys.executable, FILTERED, *calls]
    with daemon(folder, before=before) as run:
        report = stalled(run)
        assert report["culprit"]["lane"] == "worker:0/model"
        assert report["rung"] == "py-spy"  # and no native frames: they need ptrace
        assert "stuck_in_a_call" in str(report["stacks"])
        assert run.stop() == 0


@pytest.mark.skipif(not YAMA.exists(), reason="this kernel has no Yama: nothing to be allowed by")
def test_yama_is_told_whom_to_allow(folder):
    """With ptrace_scope 1 the engine's PR_SET_PTRACER is what lets our tool in."""
    assert int(YAMA.read_text()) in range(4)
    with daemon(folder, before=without_rights(folder)) as run:
        report = stalled(run)
        expected = "py-spy" if int(YAMA.read_text()) <= 1 else "faulthandler"
        assert report["rung"].startswith(expected)
        assert run.stop() == 0


def test_an_engine_that_may_not_be_looked_at_dumps_itself(folder):
    """An undumpable worker refuses every look, as all do under Yama 3: faulthandler's stacks."""
    command = [sys.executable, ENGINES, "api", str(folder), "{port}", "undumpable"]
    with daemon(folder, {"command": command}, before=without_rights(folder)) as run:
        report = stalled(run)
        assert report["culprit"]["lane"] == "worker:0/model"
        rungs = {p["address"]: p["rung"] for p in report["processes"]}
        assert rungs["worker:0"] == "faulthandler", report["processes"]
        assert "stuck_in_a_call" in str(report["stacks"])
        assert run.metric('stallwatch_evidence_captures_total{engine="') > 0
        assert run.stop() == 0
