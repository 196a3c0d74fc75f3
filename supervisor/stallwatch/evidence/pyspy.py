"""Asking py-spy for the stacks of a process, and understanding its refusals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stallwatch import procfs
from stallwatch.evidence.clean import clean, clean_bytes
from stallwatch.evidence.model import Frame, Target, ThreadStack
from stallwatch.evidence.tool import ToolRegistry, ToolResult, run

MAX_THREADS = 512
MAX_FRAMES = 128
MAX_NAME = 160
_UNSTOPPED_S = 0.2  # how long after a blocking dump a tracer may take to let go
_NO_PTRACE = "give the supervisor CAP_SYS_PTRACE, or run it and the engine with equal rights"


def locate() -> str:
    """Where py-spy is: beside the interpreter, then in PATH; '' when it is not installed."""
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    if os.access(beside, os.X_OK):
        return beside
    return shutil.which("py-spy") or ""


@dataclass(frozen=True, slots=True)
class Dump:
    """What one py-spy call gave: threads, or the reason why there are none."""

    threads: tuple[ThreadStack, ...] = ()
    problem: str = ""
    note: str = ""  # something that was mended, for the report
    late: bool = False  # no refusal: it merely did not finish in time


class PySpy:
    """py-spy, found once. `path` "" means: not installed."""

    def __init__(
        self, registry: ToolRegistry, *, path: str | None = None, proc: Path = procfs.PROC
    ) -> None:
        self._registry = registry
        self._proc = proc
        self.path = locate() if path is None else path

    def dump(self, target: Target, *, deadline_s: float, native: bool = False) -> Dump:
        """Stacks of all Python threads. Non-blocking unless `native`, which stops the target.

        `--native --nonblocking` is refused by py-spy, so native is only for a safe state.
        """
        if not self.path:
            return Dump(problem="py-spy is not installed: pip install py-spy")
        before = procfs.stat(target.pid, self._proc)
        if before is None or before.start_ticks != target.start_ticks:
            return Dump(problem="the process is gone")
        mode = "--native" if native else "--nonblocking"
        argv = [self.path, "dump", "--json", mode, "--pid", str(target.pid)]
        result = run(self._registry, argv, deadline_s=deadline_s)
        note = self._let_go(target, before.state) if native else ""
        if not result.ok:
            return Dump((), self._explain(target, result), note, late=result.timed_out)
        threads, problem = parse_dump(result.stdout)
        return Dump(threads=threads, problem=problem, note=note)

    def _let_go(self, target: Target, state_before: str) -> str:
        """Continue a target that the dump left stopped; the sentence that says so, or ''."""
        if state_before in "TtZX":
            return ""
        until = time.monotonic() + _UNSTOPPED_S
        while True:
            # A target that has not run since the signal sleeps on, and stops as soon as it wakes.
            # Asked for first: what is no longer pending then shows in the state.
            coming = self._stop_pending(target.pid)
            now = procfs.stat(target.pid, self._proc)
            if now is None or now.start_ticks != target.start_ticks:
                return ""
            if now.state not in "Tt" and not coming:
                return ""
            if (coming or now.state == "T") and procfs.tracer_pid(target.pid, self._proc) == 0:
                sent = send_signal(target, signal.SIGCONT, proc=self._proc)
                return f"py-spy left the process stopped: {sent or 'SIGCONT was sent'}"
            if time.monotonic() > until:
                return "the process is still held by a tracer after the dump"
            time.sleep(0.005)

    def _stop_pending(self, pid: int) -> bool:
        """SIGSTOP was sent to the process, or to a thread of it, and has not arrived."""
        found = procfs.status(pid, self._proc)
        masks = (found.get("SigPnd", "0"), found.get("ShdPnd", "0"))
        return any(int(mask, 16) >> (signal.SIGSTOP - 1) & 1 for mask in masks)

    def _explain(self, target: Target, result: ToolResult) -> str:
        if result.problem and result.status is None:
            return result.problem  # not started, killed or abandoned: stderr adds nothing
        now = procfs.stat(target.pid, self._proc)
        alive = now is not None and now.start_ticks == target.start_ticks
        state = now.state if alive and now is not None else ""
        return explain(result.stderr, state=state) or result.problem


def explain(stderr: bytes, *, state: str) -> str:
    """py-spy's words as one clear sentence. `state` is the target's own, '' when it is gone.

    Its 'check that the process is running' is also what it says when the caller may not read the
    target, so /proc decides (measured: a target with more capabilities than the caller).
    """
    text = stderr[:8192].decode("utf-8", "replace")
    low = text.lower()
    if state == "":
        return "the process ended before py-spy could read it"
    if state in "ZX":
        return "the process is a zombie: it has no stack any more"
    if "permission denied" in low or "not permitted" in low or "eperm" in low:
        return f"py-spy was refused (ptrace): {_NO_PTRACE}"
    if "failed to suspend" in low or "waitpid" in low:
        return "py-spy could not stop the process (it is stopped or traced already)"
    if "check that the process is running" in low:
        return f"py-spy was refused (it says the process is not running; it is): {_NO_PTRACE}"
    if "python version" in low or "unsupported version" in low or "interpreter" in low:
        return (
            "py-spy found no Python interpreter that it knows in the process: it is no Python "
            "process, or py-spy is too old for its version (pip install -U py-spy)"
        )
    lines = [line for line in text.splitlines() if line.strip()]
    return f"py-spy: {clean(lines[0], 200)}" if lines else ""


def parse_dump(raw: bytes) -> tuple[tuple[ThreadStack, ...], str]:
    """py-spy's JSON as threads, capped in every direction; a problem instead of an exception."""
    try:
        data: Any = json.loads(raw)
    except (ValueError, RecursionError):
        return (), f"py-spy's answer is not JSON: {clean_bytes(raw, 80)}"
    if not isinstance(data, list):
        return (), "py-spy's answer is not a list of threads"
    threads = tuple(_thread(item) for item in data[:MAX_THREADS] if isinstance(item, dict))
    if not threads:
        return (), "py-spy saw no Python thread"
    over = len(data) - MAX_THREADS
    return threads, f"{over} more threads were left out" if over > 0 else ""


def _thread(item: dict[str, Any]) -> ThreadStack:
    frames = item.get("frames")
    frames = frames if isinstance(frames, list) else []
    return ThreadStack(
        tid=_int(item.get("os_thread_id")),
        name=_text(item.get("thread_name")),
        frames=tuple(_frame(f) for f in frames[:MAX_FRAMES] if isinstance(f, dict)),
        active=_flag(item.get("active")),
        owns_gil=_flag(item.get("owns_gil")),
    )


def _frame(item: dict[str, Any]) -> Frame:
    name = item.get("short_filename") or item.get("filename")
    return Frame(_text(item.get("name")) or "?", _text(name) or "?", _int(item.get("line")))


def _int(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62:
        return value
    return 0


def _text(value: object) -> str:
    return clean(value, MAX_NAME) if isinstance(value, str) else ""


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def send_signal(target: Target, number: int, *, proc: Path = procfs.PROC) -> str:
    """Signal exactly that process (pid and start ticks); '' when sent, else why not."""
    try:
        fd = os.pidfd_open(target.pid)
    except OSError as error:
        return f"no signal was sent: {error.strerror}"
    try:
        # The descriptor pins the process; only now does the start time prove which one it is.
        if procfs.start_ticks(target.pid, proc) != target.start_ticks:
            return "no signal was sent: the process is gone"
        signal.pidfd_send_signal(fd, number)
    except OSError as error:
        return f"no signal was sent: {error.strerror}"
    finally:
        os.close(fd)
    return ""
