"""What evidence is made of: frames, threads, processes, and the rung that was reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Rung(StrEnum):
    """How far up the ladder a process's evidence got; the report says so."""

    NATIVE = "py-spy-native"
    PYSPY = "py-spy"
    FAULTHANDLER = "faulthandler"
    PROC = "proc"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Frame:
    name: str
    filename: str
    line: int

    def __str__(self) -> str:
        return f"{self.name} ({self.filename}:{self.line})"


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """One thread, innermost frame first. owns_gil None: the rung cannot tell."""

    tid: int
    name: str
    frames: tuple[Frame, ...]
    active: bool | None = None
    owns_gil: bool | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """A process to look at. Identity is pid and start ticks: a reused pid is never touched."""

    pid: int
    start_ticks: int
    role: str = ""
    rank: int = 0
    dump_signal: int = 0  # declared in the board; used only if SigCgt shows it
    dump_path: str = ""

    @property
    def address(self) -> str:
        return f"{self.role}:{self.rank}" if self.role else f"pid:{self.pid}"


@dataclass(frozen=True, slots=True)
class ProcessEvidence:
    """What was learnt of one process at one moment."""

    target: Target
    rung: Rung
    threads: tuple[ThreadStack, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)  # state, wchan, TracerPid, ... in words
    thread_facts: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()  # why higher rungs were not reached
    taken_ns: int = 0
    took_s: float = 0.0
