"""Errors, named by who must act. Each carries its fields, the next thing to try, and an exit code."""

from __future__ import annotations

from typing import ClassVar


class StallwatchError(Exception):
    """Root of every error that a person is meant to read: one sentence, then what to do."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message


class ConfigError(StallwatchError):
    """The operator wrote something that cannot be meant (exit 78, EX_CONFIG)."""

    exit_code: ClassVar[int] = 78

    def __init__(self, message: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(f"{where}: {message}" if where else message, hint=hint)
        self.where = where


class EngineStartError(StallwatchError):
    """The engine's command cannot be started: the operator must mend the command."""

    exit_code: ClassVar[int] = 3


class PreflightError(StallwatchError):
    """Something else holds what the engine needs (port, GPU memory): free it, then restart."""

    def __init__(self, message: str, *, hint: str = "", holders: tuple[int, ...] = ()) -> None:
        super().__init__(message, hint=hint)
        self.holders = holders


class StateDirError(StallwatchError):
    """state_dir cannot be used: the operator must mend its place or rights (exit 78)."""

    exit_code: ClassVar[int] = 78


class BoardError(StallwatchError):
    """The shared-memory board cannot be made: room or rights in /dev/shm are missing."""


class DaemonUnreachable(StallwatchError):
    """No daemon answers at the address the client was given (exit 5)."""

    exit_code: ClassVar[int] = 5


class UnknownEngine(StallwatchError):
    """No engine, stall, process or lane of that name (exit 4)."""

    exit_code: ClassVar[int] = 4
