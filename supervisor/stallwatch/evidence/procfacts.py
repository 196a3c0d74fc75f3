"""What /proc says of a process and its threads. No environment, no working directory, no memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from stallwatch import procfs
from stallwatch.evidence.clean import clean, clean_bytes
from stallwatch.evidence.model import Target

MAX_THREADS = 256
_KEEP = (
    "State", "TracerPid", "Threads", "SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt", "VmRSS",
    "RssShmem", "VmSwap", "Seccomp", "Cpus_allowed_list", "voluntary_ctxt_switches",
    "nonvoluntary_ctxt_switches",
)  # fmt: skip
# Where a thread of an engine is usually found blocked; the numbers are per architecture.
_CALLS = {
    "x86_64": {0: "read", 1: "write", 7: "poll", 16: "ioctl", 24: "sched_yield", 34: "pause",
               35: "nanosleep", 45: "recvfrom", 47: "recvmsg", 61: "wait4", 72: "fcntl",
               73: "flock", 202: "futex", 230: "clock_nanosleep", 232: "epoll_wait",
               247: "waitid", 270: "pselect6", 271: "ppoll", 281: "epoll_pwait"},
    "aarch64": {22: "epoll_pwait", 25: "fcntl", 29: "ioctl", 32: "flock", 63: "read",
                64: "write", 72: "pselect6", 73: "ppoll", 95: "waitid", 98: "futex",
                101: "nanosleep", 115: "clock_nanosleep", 124: "sched_yield", 207: "recvfrom",
                212: "recvmsg", 260: "wait4"},
}.get(os.uname().machine, {})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Facts:
    """One process. `alive` False: it is gone, or the pid belongs to somebody else by now."""

    alive: bool
    state: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    threads: dict[int, dict[str, str]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def quick(target: Target, proc: Path = procfs.PROC) -> Facts:
    """Facts from files that never wait for a lock of the target."""
    stat = procfs.stat(target.pid, proc)
    if stat is None or stat.start_ticks != target.start_ticks:
        return Facts(alive=False, problems=("the process is gone",))
    status = procfs.status(target.pid, proc)
    facts = {"state": stat.state, "cpu_ticks": str(stat.cpu_ticks), "comm": clean(stat.comm, 64)}
    facts |= {key: clean(status[key], 80) for key in _KEEP if key in status}
    facts |= {"wchan": clean(procfs.wchan(target.pid, proc=proc), 64)}
    facts |= _schedstat(target.pid, proc)
    if (count := _fd_count(target.pid, proc)) is not None:
        facts["fds"] = str(count)
    threads, problems = _threads(target.pid, proc)
    return Facts(True, stat.state, facts, threads, problems)


def deep(target: Target, proc: Path = procfs.PROC) -> dict[str, str]:
    """System call, kernel stack, run queue: as far as permitted.

    These wait for the target's exec lock, which a process stuck in execve holds: read them last,
    in a thread that may be given up.
    """
    found: dict[str, str] = {}
    base = f"{proc}/{target.pid}"
    if (call := _syscall(_read(f"{base}/syscall"))) != "":
        found["syscall"] = call
    stack = [_stack_line(line) for line in _read(f"{base}/stack").splitlines()[:24]]
    if any(stack):
        found["kernel_stack"] = " < ".join(filter(None, stack))
    for line in _read(f"{base}/sched").splitlines():
        key, _, value = line.partition(b":")
        if key.strip() in (b"policy", b"prio"):
            found[f"sched_{key.strip().decode()}"] = clean_bytes(value.strip(), 16)
    return found


def sigcgt(target: Target, number: int, proc: Path = procfs.PROC) -> bool:
    """True when that very process has a handler for the signal."""
    if not 0 < number <= 64 or procfs.start_ticks(target.pid, proc) != target.start_ticks:
        return False
    try:
        mask = int(procfs.status(target.pid, proc).get("SigCgt", "0"), 16)
    except ValueError:
        return False
    return bool(mask >> (number - 1) & 1)


def unsafe_to_stop(target: Target, proc: Path = procfs.PROC) -> str:
    """Why a blocking tool must not attach, or ''. One thread in D would hold the tool for ever."""
    stat = procfs.stat(target.pid, proc)
    if stat is None or stat.start_ticks != target.start_ticks:
        return "the process is gone"
    if tracer := procfs.tracer_pid(target.pid, proc):
        return f"pid {tracer} traces it"
    for tid in sorted(procfs.tids(target.pid, proc)):
        thread = procfs.thread_stat(target.pid, tid, proc)
        if thread is not None and thread.state in "TDtZX":
            return f"thread {tid} is in state {thread.state}"
    return ""


def _read(path: str) -> bytes:
    return procfs._read(path) or b""


def _threads(pid: int, proc: Path) -> tuple[dict[int, dict[str, str]], tuple[str, ...]]:
    tids = sorted(procfs.tids(pid, proc))
    found = {tid: facts for tid in tids[:MAX_THREADS] if (facts := _thread(pid, tid, proc))}
    over = len(tids) - MAX_THREADS
    return found, (f"{over} more threads were left out of the thread facts",) if over > 0 else ()


def _thread(pid: int, tid: int, proc: Path) -> dict[str, str]:
    stat = procfs.thread_stat(pid, tid, proc)
    if stat is None:
        return {}
    return {
        "state": stat.state,
        "cpu_ticks": str(stat.cpu_ticks),
        "wchan": clean(procfs.wchan(pid, tid, proc), 64),
        "comm": clean(stat.comm, 32),
    }


def _schedstat(pid: int, proc: Path) -> dict[str, str]:
    fields = _read(f"{proc}/{pid}/schedstat").split()
    if len(fields) != 3 or not all(f.isdigit() for f in fields):
        return {}
    return {"on_cpu_ns": fields[0].decode(), "run_queue_ns": fields[1].decode()}


def _syscall(raw: bytes) -> str:
    """'futex', 'call 17', 'running', or '' when not permitted. Arguments are left out."""
    first = raw.split(b" ", 1)[0].strip()
    if first == b"running":
        return "running"
    if not first.isdigit():
        return ""
    number = int(first[:6])
    return _CALLS.get(number, f"call {number}")


def _stack_line(line: bytes) -> str:
    """'[<0>] futex_wait_queue+0x5f/0x90' -> 'futex_wait_queue'."""
    return clean_bytes(line.rpartition(b"] ")[2].partition(b"+")[0], 64)


def _fd_count(pid: int, proc: Path) -> int | None:
    where = f"{proc}/{pid}/fd"
    try:
        if size := os.stat(where).st_size:  # the number of descriptors since Linux 6.2
            return size
        with os.scandir(where) as entries:
            return sum(1 for _ in _first(entries, 4096))
    except OSError:
        return None


def _first(entries: Iterator[os.DirEntry[str]], count: int) -> Iterator[os.DirEntry[str]]:
    for _, entry in zip(range(count), entries, strict=False):
        yield entry
