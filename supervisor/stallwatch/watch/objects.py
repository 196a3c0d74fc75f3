"""What a thread sleeps on, from outside: the other ends of its pipe, the lock file it polls for.

Read on suspicion only and in a thread with a deadline: a stat on dead network storage never returns.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISREG

from stallwatch import procfs

MAX_LOOKING = 4  # threads at once; one that hangs never comes back
MAX_LOCKS = 16
MAX_FDS = 512
MAX_PIDS = 64
MAX_FILES = 2000  # looked at in cache folders
DEPTH = 4
HEAD = 64  # bytes of a lock file: a pid at most
_BETWEEN = re.compile(r"[\s'\":,;=()\[\]]+")
_SAID = 1024  # characters of a text that are read
_READ, _WRITE = 0o0, 0o1
# Where compilers keep their lock files, below the home of whoever runs the engine.
CACHES = (".cache/torch_extensions", ".cache/flashinfer", ".cache/tvm-ffi", ".triton/cache")
CACHE_VARIABLES = ("TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")

_looking = threading.BoundedSemaphore(MAX_LOOKING)

Thread = tuple[int, int]  # pid, tid


@dataclass(frozen=True, slots=True)
class LockFile:
    """A lock file that exists. holder: a living pid that holds it, 0 when nobody does."""

    path: str
    age_s: float
    holder: int = 0
    named: bool = False  # the engine named it itself, on its board or in its log


@dataclass(frozen=True, slots=True)
class Objects:
    """Everything found. Pipes and writers: the living processes at the other end, by thread."""

    pipes: Mapping[Thread, tuple[int, ...]] = field(default_factory=dict)  # readers of its pipe
    writers: Mapping[Thread, tuple[int, ...]] = field(default_factory=dict)
    locks: tuple[LockFile, ...] = ()
    twins: frozenset[int] = frozenset()  # children that have their parent's command line: forked


@dataclass(frozen=True, slots=True)
class Question:
    """What to look at: threads by how they sleep, texts that may name a lock, cache folders."""

    writing: tuple[Thread, ...] = ()  # asleep in a pipe write
    reading: tuple[Thread, ...] = ()  # asleep in a pipe read
    members: tuple[int, ...] = ()
    children: tuple[tuple[int, int], ...] = ()  # (child, parent) that may have been forked
    texts: tuple[str, ...] = ()
    caches: tuple[str, ...] = ()
    polling: bool = False  # somebody polls for a lock: only then are folders searched


def cache_folders(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Where compilers of an engine with this environment keep their caches."""
    home = environ.get("HOME", "")
    below = [f"{home}/{name}" for name in CACHES] if home else []
    return (*(environ[name] for name in CACHE_VARIABLES if environ.get(name)), *below)


def find(question: Question, *, deadline_s: float = 0.3, proc: Path = procfs.PROC) -> Objects:
    """Answer within `deadline_s`, with less if need be. Never raises."""
    asked = question.writing or question.reading or question.polling or question.children
    if not asked:
        return Objects()
    found: list[Objects] = []

    def look() -> None:
        try:
            found.append(_find(question, proc))
        except Exception:
            # A hint that cannot be had is no hint; nothing of it may stop a verdict.
            found.append(Objects())
        finally:
            _looking.release()

    if not _looking.acquire(blocking=False):
        return Objects()  # earlier ones hang in storage that is gone
    thread = threading.Thread(target=look, name="stallwatch-objects", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # pids.max: the sick engine may share our cgroup
        _looking.release()
        return Objects()
    thread.join(deadline_s)
    return found[0] if found else Objects()


def _find(question: Question, proc: Path) -> Objects:
    ends = _ends(question, proc) if question.writing or question.reading else {}
    return Objects(
        pipes={t: _others(t, ends, _READ, proc) for t in question.writing},
        writers={t: _others(t, ends, _WRITE, proc) for t in question.reading},
        locks=tuple(_locks(question, proc)) if question.polling else (),
        twins=frozenset(c for c, p in question.children[:MAX_PIDS] if _same_program(c, p, proc)),
    )


def _same_program(child: int, parent: int, proc: Path) -> bool:
    line = _head(f"{proc}/{child}/cmdline", 8192)
    return bool(line) and line == _head(f"{proc}/{parent}/cmdline", 8192)


# -- pipes -----------------------------------------------------------------------------------------

Ends = dict[tuple[str, int], list[int]]  # (pipe, 0 read or 1 write) -> pids


def _ends(question: Question, proc: Path) -> Ends:
    """Who holds which end of which pipe, among the members and ourselves."""
    out: Ends = {}
    for pid in (*question.members[:MAX_PIDS], os.getpid()):
        for number in _numbers(pid, proc):
            pipe = _pipe(pid, number, proc)
            if pipe and (end := _end(pid, number, proc)) is not None:
                holders = out.setdefault((pipe, end), [])
                if pid not in holders:
                    holders.append(pid)
    return out


def _numbers(pid: int, proc: Path) -> list[str]:
    try:
        with os.scandir(f"{proc}/{pid}/fd") as entries:
            return [e.name for _, e in zip(range(MAX_FDS), entries, strict=False)]
    except OSError:
        return []


def _pipe(pid: int, number: str, proc: Path) -> str:
    try:
        target = os.readlink(f"{proc}/{pid}/fd/{number}")
    except OSError:
        return ""
    return target if target.startswith("pipe:") else ""


def _end(pid: int, number: str, proc: Path) -> int | None:
    """0 for a reading end, 1 for a writing one."""
    for line in _head(f"{proc}/{pid}/fdinfo/{number}", 512).splitlines():
        if line.startswith("flags:"):
            try:
                mode = int(line.split()[1], 8) & 0o3
            except (IndexError, ValueError):
                return None
            return mode if mode in (_READ, _WRITE) else None
    return None


def _others(thread: Thread, ends: Ends, end: int, proc: Path) -> tuple[int, ...]:
    """Who holds that end of the pipe that this thread sleeps on."""
    pid, tid = thread
    call = _head(f"{proc}/{pid}/task/{tid}/syscall", 128).split()
    if len(call) < 2 or not call[0].isdigit():
        return ()
    try:
        pipe = _pipe(pid, str(int(call[1], 16)), proc)
    except ValueError:
        return ()
    return tuple(ends.get((pipe, end), ())) if pipe else ()


# -- lock files ------------------------------------------------------------------------------------


def _locks(question: Question, proc: Path) -> Iterable[LockFile]:
    """Lock files that exist: those the engine named first, then those of compilers' caches."""
    seen: set[str] = set()
    held = _flocked(proc)
    named = (path for text in question.texts for path in _paths(text))
    for path, said in (*((p, True) for p in named), *((p, False) for p in _cached(question))):
        if path in seen or len(seen) >= MAX_LOCKS:
            continue
        seen.add(path)
        try:
            stat = os.stat(path)
        except OSError:
            continue
        if not S_ISREG(stat.st_mode):
            continue  # a worker may name anything: nothing but a file is opened
        age = max(0.0, time.time() - stat.st_mtime)  # a file's date is wall time, and only shown
        holder = held.get(stat.st_ino, 0) or _owner(path, proc)
        yield LockFile(path, age, holder, said)


def _paths(text: str) -> Iterable[str]:
    """Absolute paths in a text that speak of a lock."""
    for word in _BETWEEN.split(text[:_SAID]):
        lower = word.lower()
        if word.startswith("/") and ("lock" in lower or "baton" in lower):
            yield word


def _cached(question: Question) -> Iterable[str]:
    left = MAX_FILES
    for root in question.caches:
        for folder, folders, files in os.walk(root):
            if folder.count("/") - root.count("/") >= DEPTH:
                folders.clear()
            left -= len(files) + 1
            if left < 0:
                return
            yield from (
                os.path.join(folder, f) for f in files if f == "lock" or f.endswith(".lock")
            )


def _flocked(proc: Path) -> dict[int, int]:
    """Inode to pid of every file lock that is held."""
    out: dict[int, int] = {}
    for line in _head(f"{proc}/locks", 65536).splitlines():
        parts = line.split()
        if len(parts) < 6 or parts[1] == "->" or not parts[4].lstrip("-").isdigit():
            continue
        inode = parts[5].rpartition(":")[2]
        if inode.isdigit():
            out[int(inode)] = max(1, int(parts[4]))  # -1: an open file description's lock
    return out


def _owner(path: str, proc: Path) -> int:
    """A living pid that the file itself names, or 0."""
    words = _head(path, HEAD).split()
    if not words or not words[0].isdigit() or len(words[0]) > 8:
        return 0
    pid = int(words[0])
    return pid if procfs.start_ticks(pid, proc) is not None else 0


def _head(path: str, size: int) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(fd, size).decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(fd)
