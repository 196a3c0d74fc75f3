"""Checks of what evidence needs: py-spy, Yama, capabilities. The proof is a dump of a real child."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from stallwatch import procfs
from stallwatch.doctor.check import Result, fail, ok, run, warn

CAP_SYS_PTRACE = 19
_DUMP_S = 4.0
_START_S = 5.0

# As attach() does in an engine: under Yama 1 only a declared ancestor's helpers may trace it.
_CHILD = """
import ctypes, os, sys
try:
    ctypes.CDLL(None).prctl(0x59616d61, os.getppid(), 0, 0, 0)
except Exception:
    pass
print("here", flush=True)
sys.stdin.read()
"""


def locate() -> str:
    """py-spy beside our interpreter, else in PATH, else ''."""
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    return beside if os.access(beside, os.X_OK) else shutil.which("py-spy") or ""


@contextlib.contextmanager
def throwaway() -> Iterator[int | None]:
    """The pid of a Python child that waits, or None when it did not start in time."""
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with child:
        try:
            assert child.stdout is not None
            there, _, _ = select.select([child.stdout], [], [], _START_S)
            yield child.pid if there and child.stdout.readline() else None
        finally:
            child.kill()


def pyspy(path: str | None = None) -> Result:
    """Whether py-spy attaches to a child of ours, and how far it gets."""
    name = "py-spy"
    path = locate() if path is None else path
    if not path:
        return fail(name, "not installed", "pip install py-spy")
    with throwaway() as pid:
        if pid is None:
            return fail(
                name, "a throw-away Python child did not start", f"run {sys.executable} by hand"
            )
        plain = run([path, "dump", "--json", "--nonblocking", "--pid", str(pid)], _DUMP_S)
        native = run([path, "dump", "--json", "--native", "--pid", str(pid)], _DUMP_S)
    if plain is None:
        return fail(name, f"{path} cannot be started", "pip install --force-reinstall py-spy")
    if plain.code != 0:
        why = "it hung" if plain.code is None else (plain.err.strip().splitlines() or ["?"])[0]
        return fail(
            name, f"cannot read a child of ours ({why}); rung: faulthandler or /proc",
            "CAP_SYS_PTRACE for stallwatch (containers: --cap-add=SYS_PTRACE), or Yama at most 1",
        )  # fmt: skip
    if native is None or native.code != 0:
        return warn(
            name, "rung py-spy works, native frames do not",
            "native frames need ptrace to stop the target: CAP_SYS_PTRACE, or a seccomp profile that allows it",
        )  # fmt: skip
    return ok(name, f"attaches with native frames ({path})")


def yama(proc: Path = procfs.PROC, *, capable: bool | None = None) -> Result:
    """Who may trace whom."""
    name = "Yama"
    try:
        scope = (proc / "sys/kernel/yama/ptrace_scope").read_text().strip()
    except OSError:
        return ok(name, "not in this kernel: a user may trace his own processes")
    capable = has_ptrace(proc)[0] if capable is None else capable
    if scope == "0" or (scope in "12" and capable):
        return ok(
            name, f"ptrace_scope = {scope}" + (" (we have CAP_SYS_PTRACE)" if capable else "")
        )
    if scope == "1":
        return ok(name, "ptrace_scope = 1: engines that attach to the board allow us by themselves")
    remedy = "sysctl kernel.yama.ptrace_scope=1, or give stallwatch CAP_SYS_PTRACE"
    if scope == "3":
        remedy = "nobody can trace until a reboot: set kernel.yama.ptrace_scope=1 at boot"
    return fail(name, f"ptrace_scope = {scope}: py-spy is refused", remedy)


def has_ptrace(proc: Path = procfs.PROC) -> tuple[bool, bool]:
    """CAP_SYS_PTRACE (effective, in the bounding set)."""
    try:
        lines = (proc / "self/status").read_text().splitlines()
    except OSError:
        return False, False
    sets = {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}

    def holds(key: str) -> bool:
        return bool(int(sets.get(key, "0"), 16) >> CAP_SYS_PTRACE & 1)

    return holds("CapEff"), holds("CapBnd")


def capabilities(proc: Path = procfs.PROC) -> Result:
    """CAP_SYS_PTRACE lets us read processes of other users and such as called setuid."""
    name = "capabilities"
    effective, bounding = has_ptrace(proc)
    if effective:
        return ok(name, "CAP_SYS_PTRACE is effective")
    if bounding:
        return ok(name, "no CAP_SYS_PTRACE; enough while engines run as the same user")
    return warn(
        name, "CAP_SYS_PTRACE is not even in the bounding set",
        "needed only for engines of another user: --cap-add=SYS_PTRACE, CapabilityBoundingSet=",
    )  # fmt: skip
