"""The folders of one start of an engine, what its environment says of them, and the note about them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from stallwatch import inject, procfs
from stallwatch.board.create import BoardFolder
from stallwatch.chaos import faults
from stallwatch.config import EngineConfig
from stallwatch.daemon.parts import Parts
from stallwatch.errors import StallwatchError
from stallwatch.inject.site import plugins_only
from stallwatch.process import statefile
from stallwatch.process.members import Membership
from stallwatch.process.rundir import RunDir

# Ours, not the engine's: it must not answer for us, nor hold our keys.
_NOT_INHERITED = (
    "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES",
    "STALLWATCH_TOKEN", "STALLWATCH_SOCKET", "STALLWATCH_URL", "STALLWATCH_BOARD",
)  # fmt: skip


class Premises:
    """Board folder, run folder and, if faults may be injected, a folder for them."""

    def __init__(self, name: str, number: int, parts: Parts, config: EngineConfig) -> None:
        self.chaos: Path | None = None
        self._name = name
        self._number = number
        self._parts = parts
        self._config = config
        self._board: BoardFolder | None = None
        self._run: RunDir | None = None
        self._unsaved = ""

    def make(self, remember: Callable[[], None]) -> tuple[BoardFolder, RunDir]:
        """Make both, and have each noted: a daemon killed in here must not lose track of them."""
        shm = self._parts.config.supervisor.shm
        self._board = BoardFolder.plan(shm, engine=self._name, incarnation=self._number)
        remember()  # before it is made
        self._board.make(engine=self._name, incarnation=self._number)
        self._run = RunDir.create(self._name, self._number)
        remember()
        return self._board, self._run

    def environment(self, command: Sequence[str]) -> dict[str, str]:
        """All that the engine gets. Only once the folders are made."""
        assert self._board is not None
        assert self._run is not None
        env = {k: v for k, v in os.environ.items() if k not in _NOT_INHERITED}
        env |= self._config.env
        env |= self._run.environment(env)
        env |= self._board.environment()
        env.pop(faults.ENV, None)  # an engine that takes faults is the configuration's wish alone
        if self._parts.config.supervisor.chaos:
            self.chaos = Path(self._run.path) / faults.FOLDER
            self.chaos.mkdir(mode=0o700, exist_ok=True)
            env[faults.ENV] = str(self.chaos)
        if self._config.plugin == "off":
            return env
        if self._config.plugin == "inject" or inject.needed(command, environ=env):
            return env | inject.prepare(Path(self._run.path), environ=env)
        return env | plugins_only(env)

    def remember(self, membership: Membership, root_pid: int) -> None:
        """The state file: what the next daemon must know if this one is killed now."""
        if self._board is None:
            return
        board = membership.board
        record = statefile.TreeRecord(
            engine=self._name,
            incarnation=self._number,
            boot_id=statefile.boot_id(),
            session=root_pid,
            supervisor=(os.getpid(), procfs.start_ticks(os.getpid()) or 0),
            members=tuple(membership.ever().items()),
            board=str(self._board.path),
            board_file=(board.dev, board.inode) if board else None,
            run_dirs=self._run.paths() if self._run else (),
        )
        try:
            statefile.save(str(self._parts.state_dir), record)
            self._unsaved = ""
        except StallwatchError as error:
            if str(error) != self._unsaved:  # at each membership change: once is enough
                self._unsaved = str(error)
                self._parts.events.emit(self._name, "fault", str(error))

    def remove(self) -> None:
        """The tree is gone: the folders and the note about it go too."""
        for folder in (self._board, self._run):
            if folder is not None:
                folder.remove()
        if self._board is not None:  # before that, the note is about an earlier daemon's tree
            statefile.forget(str(self._parts.state_dir), self._name)
