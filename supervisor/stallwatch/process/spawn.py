"""Starting an engine: own session, one output pipe, clean signals, a pidfd at once."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from stallwatch import procfs
from stallwatch.errors import EngineStartError
from stallwatch.process.posix import posix_spawn

_CLONE_FS = 0x200
_BURY_S = 1.0
_UNBORN_S = 2.0


@dataclass(frozen=True, slots=True)
class SpawnSpec:
    """What to start. `env` is the whole environment, not an addition."""

    command: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str | None = None


@dataclass(frozen=True, slots=True)
class Child:
    """A started engine. Whoever takes it closes both descriptors (Membership and OutputPump do)."""

    pid: int
    start_ticks: int
    pidfd: int
    output: int = field(repr=False)  # read end of its stdout and stderr


class Spawner(Protocol):
    """How engines are started; `stallwatch.testing.spawner` has one without processes."""

    def __call__(self, spec: SpawnSpec) -> Child: ...


def spawn(spec: SpawnSpec, *, hold: AbstractContextManager[object] | None = None) -> Child:
    """Start the command. Raises EngineStartError naming what is wrong with it.

    `hold` (Reaper.hold()) keeps the reaper away until the pidfd is open, or an engine that dies
    at once would be reaped as a stranger's orphan. Blocks for as long as the program's file
    system takes to answer, and no other thread with it.
    """
    path = resolve(spec)
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    pid = 0
    try:
        with hold or nullcontext():
            pid = _in_own_folder(spec, path, write_end)
            pidfd = os.pidfd_open(pid)
            ticks = procfs.start_ticks(pid) or 0
    except OSError as error:
        os.close(read_end)
        if pid:  # it runs, and we could not even get a name for it
            _bury(pid)
        raise _refused(spec, path, error) from error
    finally:
        os.close(write_end)
    return Child(pid=pid, start_ticks=ticks, pidfd=pidfd, output=read_end)


def _bury(pid: int) -> None:
    """Kill our own child and take its status. What survives that is the reaper's."""
    until = time.monotonic() + _BURY_S
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
        while time.monotonic() < until and os.waitpid(pid, os.WNOHANG) == (0, 0):
            time.sleep(0.01)


def end_unborn() -> list[int]:
    """Kill our children that have not begun their own program for two seconds; returns their pids.

    Their exec waits for a file system. When it answers after our end, an engine would begin that
    nobody knows. Until the exec they have our memory, so our command line too.
    """
    us, ours = os.getpid(), procfs.cmdline(os.getpid())
    born = time.clock_gettime(time.CLOCK_BOOTTIME) - _UNBORN_S
    latest = int(born * os.sysconf("SC_CLK_TCK"))
    stats = (procfs.stat(pid) for pid in procfs.pids())
    old = [s.pid for s in stats if s and s.ppid == us and s.start_ticks < latest]
    found = [pid for pid in old if procfs.cmdline(pid) == ours]
    for pid in found:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return found


def resolve(spec: SpawnSpec) -> str:
    """The file that will be executed. Raises EngineStartError with the nearest hint."""
    if not spec.command or not spec.command[0]:
        raise EngineStartError(
            "the engine's command is empty", hint="Write it after --, or set command = [...]."
        )
    if any("\0" in item for item in spec.command):
        raise EngineStartError("the engine's command holds a NUL character")
    for key, value in spec.env.items():  # C would cut them there, and say nothing
        if not key or "=" in key or "\0" in key + value:
            raise EngineStartError(
                f"the engine's environment holds {key!r}, which no environment can hold",
                hint="Mend [engines.NAME.env]: no NUL character, and no '=' in a name.",
            )
    if spec.cwd is not None and not os.path.isdir(spec.cwd):
        raise EngineStartError(
            f"the working folder {spec.cwd} does not exist", hint="Create it, or change cwd."
        )
    name = spec.command[0]
    if "/" in name:
        return _checked(name, os.path.join(spec.cwd or "", name))
    found = shutil.which(name, path=spec.env.get("PATH", os.defpath))
    if found is None:
        raise EngineStartError(f"command not found: {name}", hint=_path_hint(name, spec.env))
    return os.path.abspath(found)


def _checked(name: str, path: str) -> str:
    if not os.path.exists(path):
        raise EngineStartError(
            f"command not found: {name}", hint="Check the path; it is taken from the engine's cwd."
        )
    if os.path.isdir(path):
        raise EngineStartError(f"{name} is a folder, not a program", hint="Name the file in it.")
    if not os.access(path, os.X_OK):
        raise EngineStartError(f"{name} is not executable", hint=f"Run: chmod +x {path}")
    return path


def _path_hint(name: str, env: Mapping[str, str]) -> str:
    beside = os.path.join(os.path.dirname(sys.executable), name)
    if os.access(beside, os.X_OK):
        return f"It lies beside this Python: use {beside}, or activate that environment."
    if " " in name:
        return "Command and arguments are separate items: one word each."
    return f"Give its full path, or put its folder on PATH (now {env.get('PATH', '')!r})."


def _refused(spec: SpawnSpec, path: str, error: OSError) -> EngineStartError:
    name = spec.command[0]
    if error.errno == errno.ENOEXEC:
        return EngineStartError(
            f"{name} is neither a program nor a script",
            hint=f"A script needs a first line like #!/bin/sh in {path}.",
        )
    if error.errno == errno.ENOENT:
        return EngineStartError(
            f"{name} cannot be run: its interpreter does not exist",
            hint=f"Check the #! line of {path}.",
        )
    if error.errno == errno.E2BIG:
        return EngineStartError(f"{name}: arguments and environment are too long")
    return EngineStartError(f"{name} cannot be started: {error.strerror or error}")


def _in_own_folder(spec: SpawnSpec, path: str, output: int) -> int:
    """posix_spawn knows no working folder: a short-lived thread gets one of its own.

    Not Popen: it leaves ignored signals ignored (nohup, a shell's &) and the mask as it is, and
    its preexec_fn may deadlock in a process with threads. Not chdir: it would move the daemon.
    """
    if spec.cwd is None:
        return _launch(spec, path, output)
    result: list[int | OSError] = []

    def work() -> None:
        try:
            _unshare_folder()
            os.chdir(spec.cwd or ".")
            result.append(_launch(spec, path, output))
        except OSError as error:
            result.append(error)

    thread = threading.Thread(target=work, name="spawn", daemon=True)
    thread.start()
    thread.join()
    if isinstance(result[0], OSError):
        raise result[0]
    return result[0]


def _unshare_folder() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_FS) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _launch(spec: SpawnSpec, path: str, output: int) -> int:
    return posix_spawn(path, spec.command, spec.env, output=output, close=_inheritable())


def _inheritable() -> list[int]:
    """Descriptors above 2 without close-on-exec: inherited by us, or made by C code."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if int(name) > 2 and os.get_inheritable(int(name)):
                found.append(int(name))
        except OSError:
            continue
    return found
