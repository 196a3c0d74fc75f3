"""The rung below py-spy: ask the process itself, through the dump signal that it declared.

The handler runs in C and needs no GIL, so it works where the interpreter is stuck. It disturbs
what it observes (a C call that can be interrupted returns EINTR), hence only when py-spy failed.
"""

from __future__ import annotations

import os
import re
import stat as stat_bits
import time
from dataclasses import dataclass
from pathlib import Path

from stallwatch import procfs
from stallwatch.evidence.clean import clean
from stallwatch.evidence.model import Frame, Target, ThreadStack
from stallwatch.evidence.procfacts import sigcgt
from stallwatch.evidence.pyspy import MAX_FRAMES, MAX_NAME, send_signal

MAX_BYTES = 1 << 20
MAX_THREADS = 100  # as many as faulthandler itself writes
_POLL_S = 0.01
_SETTLED = 3  # polls without growth that end a dump
_DEEP = 4  # folders below the run folder
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-fA-F]{1,16})(?: \[([^\]]{0,160})\])?")
_FRAME = re.compile(r'\s+File "([^"]{0,4096})", line (\d{1,9}|\?\?\?) in (.{0,1024})')


@dataclass(frozen=True, slots=True)
class Dumped:
    threads: tuple[ThreadStack, ...] = ()
    problem: str = ""


def dump(
    target: Target, run_folder: Path | None, *, deadline_s: float, proc: Path = procfs.PROC
) -> Dumped:
    """Signal the process and read what its handler wrote. Nothing is sent unless all checks pass."""
    if not target.dump_signal or not target.dump_path:
        return Dumped(problem="it declared no faulthandler signal")
    if (refusal := _unable(target, proc)) != "":
        return Dumped(problem=refusal)
    try:
        fd = _open(target, run_folder, proc)
    except (OSError, ValueError) as error:
        return Dumped(problem=f"its faulthandler file is refused: {clean(str(error), 120)}")
    try:
        start = os.fstat(fd).st_size
        if (unsent := send_signal(target, target.dump_signal, proc=proc)) != "":
            return Dumped(problem=unsent)
        text = _grown(fd, start, time.monotonic() + deadline_s)
    finally:
        os.close(fd)
    threads = parse(text)
    return Dumped(threads, "" if threads else "its faulthandler wrote nothing in time")


def _unable(target: Target, proc: Path) -> str:
    found = procfs.stat(target.pid, proc)
    if found is None or found.start_ticks != target.start_ticks:
        return "the process is gone"
    if found.state in "TtZXD":
        return f"its faulthandler cannot run in state {found.state}"
    if not sigcgt(target, target.dump_signal, proc):
        return f"it has no handler for signal {target.dump_signal}"
    return ""


def _open(target: Target, run_folder: Path | None, proc: Path) -> int:
    """The file by name, below the run folder, following no link. Raises OSError, ValueError."""
    if run_folder is None:
        raise ValueError("the run folder is not known")
    inside = os.path.relpath(os.path.join(run_folder, target.dump_path), run_folder)
    parts = inside.split("/")
    if ".." in parts or parts == ["."] or len(parts) > _DEEP or "\0" in inside:
        raise ValueError("it lies outside the run folder")
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(run_folder, flags | os.O_DIRECTORY)
    for i, part in enumerate(parts):
        # O_NONBLOCK: opening a FIFO that was put there must not wait for a writer.
        kind = os.O_DIRECTORY if i < len(parts) - 1 else os.O_NONBLOCK
        try:
            below = os.open(part, flags | kind, dir_fd=fd)
        finally:
            os.close(fd)
        fd = below
    info = os.fstat(fd)
    if not stat_bits.S_ISREG(info.st_mode) or info.st_uid not in _owners(target, proc):
        os.close(fd)
        raise ValueError("it is no regular file of the engine's user or ours")
    return fd


def _owners(target: Target, proc: Path) -> set[int]:
    uids = procfs.status(target.pid, proc).get("Uid", "").split()
    return {os.geteuid(), *(int(uid) for uid in uids[:2] if uid.isdigit())}


def _grown(fd: int, start: int, until: float) -> str:
    """Wait until the file has grown and stands still; at most MAX_BYTES of what was added."""
    size, still = start, 0
    while time.monotonic() < until:
        now = os.fstat(fd).st_size
        still = still + 1 if now == size and now > start else 0
        size = now
        if still >= _SETTLED or size - start >= MAX_BYTES:
            break
        time.sleep(_POLL_S)
    return os.pread(fd, MAX_BYTES, start).decode("utf-8", "replace") if size > start else ""


def parse(text: str) -> tuple[ThreadStack, ...]:
    """The handler's text as threads. Its ids are pthread ids: which tid each has is not known."""
    threads: list[ThreadStack] = []
    name = ""
    frames: list[Frame] = []
    for line in text[:MAX_BYTES].splitlines():
        if (head := _THREAD.match(line)) is not None:
            if name:
                threads.append(ThreadStack(0, name, tuple(frames)))
            label = f" ({clean(head[2], MAX_NAME)})" if head[2] else ""
            name, frames = f"pthread 0x{int(head[1], 16):x}{label}", []
            if len(threads) >= MAX_THREADS:
                return tuple(threads)
        elif name and len(frames) < MAX_FRAMES and (found := _FRAME.match(line)) is not None:
            frames.append(_frame(found[1], found[2], found[3]))
    if name:
        threads.append(ThreadStack(0, name, tuple(frames)))
    return tuple(threads[:MAX_THREADS])


def _frame(path: str, line: str, name: str) -> Frame:
    short = "/".join(path.rsplit("/", 2)[-2:])
    number = int(line) if line.isdigit() and line.isascii() else 0
    return Frame(clean(name, MAX_NAME), clean(short, MAX_NAME), number)
