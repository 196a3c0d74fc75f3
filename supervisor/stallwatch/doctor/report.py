"""All checks in the order in which they matter at night."""

from __future__ import annotations

from collections.abc import Mapping

from stallwatch.doctor import engine, host, ptrace
from stallwatch.doctor.check import Check, Level, Result, run_all

CHECKS: Mapping[str, Check] = {
    "py-spy": ptrace.pyspy,
    "Yama": ptrace.yama,
    "capabilities": ptrace.capabilities,
    "shared memory": host.shm,
    "logind RemoveIPC": host.remove_ipc,
    "cgroup": host.cgroup,
    "clock": host.clock,
    "limits": host.limits,
    "kernel": host.kernel,
    "python": host.python,
    "GPU tools": engine.gpu,
    "vLLM": engine.vllm,
}


def examine(checks: Mapping[str, Check] = CHECKS) -> list[Result]:
    """Run them all; within check.DEADLINE_S, whatever hangs."""
    return run_all(checks)


def exit_code(results: list[Result]) -> int:
    """1 when something fails; warnings do not count."""
    return int(any(each.level is Level.FAIL for each in results))
