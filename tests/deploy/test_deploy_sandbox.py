"""The unit's sandbox, set up by hand from what the unit file says: a stall with stacks inside of it.

Not systemd itself: the same mounts, identity and filter of system calls, read from the unit.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from daemon_helpers import Daemon, daemon, place, until
from deploy_helpers import DEPLOY, FILTERED, NO_RIGHTS, opened, own, tool, unit
from deploy_seccomp import numbers

pytestmark = [pytest.mark.process, pytest.mark.slow]

SERVICE = unit(DEPLOY / "systemd/stallwatch.service")


def expanded(words: list[str]) -> set[str]:
    """Names of system calls, with every @set of systemd replaced by its members."""
    found: set[str] = set()
    for word in words:
        if not word.startswith("@"):
            found.add(word)
            continue
        argv = [tool("systemd-analyze", "apt install systemd"), "syscall-filter", word]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True)
        rows = [r.strip() for r in done.stdout.splitlines()]
        found |= expanded([r for r in rows if r and not r.startswith("#") and r != word])
    return found


def allowed() -> str:
    """What SystemCallFilter= of the unit lets through, separated by commas."""
    (line,) = SERVICE["Service.SystemCallFilter"]
    # an allow list always holds @default: systemd.exec(5)
    return ",".join(sorted(expanded([*line.split(), "@default"])))


def sandbox(folder: Path) -> list[str]:
    """ProtectSystem=strict, ProtectProc=invisible, PrivateTmp=, no rights, the filter of calls."""
    lines = [
        *opened(folder / "hold"),
        f"mount --bind {folder} {folder}",
        "mount -t tmpfs -o mode=1777 none /dev/shm",
        # `bind`: this mount alone, and not the file system that others use
        "mount -o remount,bind,ro /",
        "mount -t proc -o nosuid,nodev,noexec,hidepid=2 proc /proc",
    ]
    script = "\n".join(["set -e", *lines, 'exec "$@"'])
    namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    filtered = [sys.executable, FILTERED, "allow", allowed()]
    return [*namespaces, "sh", "-c", script, "sh", *NO_RIGHTS, *filtered]


def possible() -> bool:
    argv = ["unshare", "--mount", "--pid", "--fork", "mount", "-t", "proc", "proc", "/proc"]
    try:
        return subprocess.run(argv, capture_output=True, timeout=20, check=False).returncode == 0
    except OSError:
        return False


@pytest.fixture
def folder() -> Iterator[Path]:
    with place() as path:
        own(path)
        yield path


def inner(run: Daemon) -> psutil.Process:
    """The daemon itself: unshare's only child."""
    return until(
        lambda: next(iter(psutil.Process(run.process.pid).children()), None), what="a child"
    )


@pytest.mark.skipif(not possible(), reason="namespaces need root")
@pytest.mark.skipif(not numbers(), reason="linux-libc-dev is not installed")
def test_a_stall_inside_the_units_sandbox(folder):
    """Nothing but its own folders can be written and few calls are left: verdict, stacks, restart."""
    assert SERVICE["Service.ProtectSystem"] == ["strict"]
    assert SERVICE["Service.ProtectProc"] == ["invisible"]
    with daemon(folder, before=sandbox(folder)) as run:
        run.wait_ready()
        one = inner(run)
        status = Path(f"/proc/{one.pid}/status").read_text()
        assert re.search(r"^Seccomp:\t2$", status, re.MULTILINE)
        assert re.search(r"^CapBnd:\t0+$", status, re.MULTILINE)
        mounts = Path(f"/proc/{one.pid}/mounts").read_text().splitlines()
        options = {row.split()[1]: row.split()[3].split(",") for row in mounts}
        assert "ro" in options["/"]
        run.order("worker", "stall")
        report = run.wait_stall()
        run.wait_ready(2)
        report = run.report(report["id"])
        assert report["culprit"]["lane"] == "worker:0/model"
        assert report["rung"].startswith("py-spy"), report["processes"]
        assert "stuck_in_a_call" in str(report["stacks"])
        assert not [e for e in run.events() if e["type"] == "fault"]
        one.terminate()
        assert run.wait_exit() == 0


def test_the_filter_keeps_what_evidence_and_engines_need():
    """Stacks (plain and native), pidfds and threads; and it forbids what nobody here needs."""
    names = set(allowed().split(","))
    needed = {"ptrace", "process_vm_readv", "pidfd_open", "prctl", "clone3", "waitid", "mbind"}
    assert needed <= names
    assert not names & {"mount", "reboot", "init_module", "kexec_load", "bpf", "perf_event_open"}
