"""Memory near the devices: what an offload process does about NUMA before it loads its tables.

It inherits a strict binding from the worker, under which a table larger than one node fails or thrashes.
Each step is tried alone, logged, and never fatal: a container may forbid any of them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stallwatch_engine.ple.offload.memory import available

MPOL_DEFAULT, MPOL_PREFERRED, MPOL_BIND, MPOL_LOCAL = 0, 1, 2, 4
_LOCAL_FIRST = {
    MPOL_DEFAULT,
    MPOL_PREFERRED,
    MPOL_LOCAL,
}  # a kernel may report MPOL_LOCAL as preferred
_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}  # set_mempolicy, get_mempolicy
_MASK_WORDS = 16  # 1024 nodes, the kernel's own limit

CHUNK = 256 << 20
HEADROOM = 4 << 30
HEADROOM_SHARE = 0.10  # of the host's memory

NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that was tried."""

    name: str
    done: bool
    detail: str

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.detail}"
            if self.done
            else f"{self.name}: left as it is ({self.detail})"
        )


def settle(cpus: str = "") -> tuple[Step, ...]:
    """Allocate local first, and stay on those CPUs (a cpulist; empty: where we may run already)."""
    return _tried("memory policy", local_first), _tried("affinity", lambda: affinity(cpus))


def memory_policy() -> tuple[int, tuple[int, ...]]:
    """(mode, nodes) of this thread, as the kernel reports it. OSError where it does not."""
    mode = ctypes.c_int(-1)
    mask = (ctypes.c_ulong * _MASK_WORDS)()
    _call(1, ctypes.byref(mode), mask, ctypes.c_ulong(_MASK_WORDS * 64), None, ctypes.c_ulong(0))
    nodes = tuple(n for n in range(_MASK_WORDS * 64) if mask[n // 64] >> (n % 64) & 1)
    return mode.value, nodes


def set_memory_policy(mode: int, nodes: tuple[int, ...] = ()) -> None:
    """What this thread and its later children allocate from. OSError where it is forbidden."""
    if not nodes:
        _call(0, ctypes.c_int(mode), None, ctypes.c_ulong(0))
        return
    mask = (ctypes.c_ulong * _MASK_WORDS)()
    for node in nodes:
        mask[node // 64] |= 1 << (node % 64)
    _call(0, ctypes.c_int(mode), mask, ctypes.c_ulong(_MASK_WORDS * 64))


def local_first() -> str:
    """Undo an inherited binding, and ask the kernel whether that holds; what was found, in words."""
    mode, nodes = memory_policy()
    if mode != MPOL_BIND:
        return f"not bound (mode {mode})"
    set_memory_policy(MPOL_LOCAL)
    now, _ = memory_policy()
    if now not in _LOCAL_FIRST:
        raise OSError(f"the kernel still reports mode {now}")
    return f"was bound to nodes {','.join(map(str, nodes))}; now local first"


def affinity(cpus: str) -> str:
    """Run on those CPUs, as far as this process may at all; what was done, in words."""
    allowed = os.sched_getaffinity(0)
    if not cpus:
        return f"{len(allowed)} CPUs, as inherited"
    wanted = cpu_list(cpus) & allowed
    if not wanted:
        raise ValueError(f"none of the CPUs {cpus} is allowed here")
    os.sched_setaffinity(0, wanted)
    return f"{len(wanted)} of the CPUs {cpus}"


def cpu_list(text: str) -> set[int]:
    """The numbers in a kernel cpulist such as `0-3,8`. ValueError for anything else."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def node_cpus(node: int, root: Path = NODES) -> str:
    """The cpulist of a memory node, empty when the kernel does not tell."""
    try:
        return (root / f"node{node}" / "cpulist").read_text().strip()
    except OSError:
        return ""


def prefault(memory: npt.NDArray[np.uint8], progress: Callable[[int], object] = int) -> Step:
    """Touch a byte of each page, in chunks of 256 MiB, if what is missing fits with headroom.

    Headroom is the larger of 4 GiB and a tenth of the host's memory. Otherwise it warns: pages then
    come when rows are first read.
    """
    name = f"prefault of {memory.nbytes / 2**20:.0f} MiB"
    try:
        spare, headroom = available(), max(HEADROOM, int(_total() * HEADROOM_SHARE))
    except OSError as error:
        return Step(name, done=False, detail=str(error))
    missing = memory.nbytes - resident(memory)
    if missing + headroom > spare:
        detail = (
            f"{missing >> 20} MiB missing and {headroom >> 20} MiB headroom, {spare >> 20} MiB free"
        )
        return Step(name, done=False, detail=detail)
    for start in range(0, memory.nbytes, CHUNK):
        chunk = memory[start : start + CHUNK]
        int(chunk[:: mmap.PAGESIZE].sum(dtype=np.uint64))
        progress(chunk.nbytes)
    return Step(name, done=True, detail=f"{missing >> 20} MiB were missing")


def resident(memory: npt.NDArray[np.uint8]) -> int:
    """Bytes of it that are in memory now; 0 when the kernel does not tell."""
    start = memory.ctypes.data & -mmap.PAGESIZE
    length = memory.ctypes.data + memory.nbytes - start
    pages = np.zeros(-(-length // mmap.PAGESIZE), dtype=np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.mincore(
        ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_void_p(pages.ctypes.data)
    )
    return 0 if failed else min(memory.nbytes, int((pages & 1).sum()) * mmap.PAGESIZE)


def _total() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _tried(name: str, deed: Callable[[], str]) -> Step:
    try:
        return Step(name, done=True, detail=deed())
    except (OSError, ValueError, KeyError) as error:
        return Step(name, done=False, detail=str(error))


def _call(which: int, *arguments: object) -> None:
    numbers = _CALLS.get(platform.machine())
    if numbers is None:
        raise OSError(f"memory policies are unknown on {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(numbers[which]), *arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
