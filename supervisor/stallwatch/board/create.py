"""Making a board: one private folder per engine incarnation, in shared memory."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from stallwatch import procfs
from stallwatch.errors import BoardError
from stallwatch.heartbeat import layout

SHM = Path("/dev/shm")  # noqa: S108  (a tmpfs is what the board needs; its folder is 0700)


@dataclass(frozen=True, slots=True)
class BoardFolder:
    """The folder of one incarnation's board. Its path goes to the engine in STALLWATCH_BOARD."""

    path: Path

    @property
    def file(self) -> Path:
        """The board file itself."""
        return self.path / layout.BOARD_FILE

    def environment(self) -> dict[str, str]:
        """What the engine's environment needs so that its processes find the board."""
        return {layout.ENV: str(self.path)}

    def remove(self) -> None:
        """Delete the folder; mapped copies live on until their processes end. Never raises."""
        shutil.rmtree(self.path, ignore_errors=True)

    @classmethod
    def create(
        cls,
        parent: Path,
        *,
        engine: str,
        incarnation: int,
        lanes: int = 512,
        processes: int = 128,
    ) -> BoardFolder:
        """Make the folder (0700) and the fully allocated board file (0600).

        Raises BoardError when the parent cannot be written or has no room: now, not as a SIGBUS in
        an engine later.
        """
        folder = cls.plan(parent, engine=engine, incarnation=incarnation)
        folder.make(engine=engine, incarnation=incarnation, lanes=lanes, processes=processes)
        return folder

    @classmethod
    def plan(cls, parent: Path, *, engine: str, incarnation: int) -> BoardFolder:
        """A new name. Nothing is made: whoever must find the folder again writes it down first."""
        return cls(parent / f"stallwatch-{engine}-{incarnation}-{secrets.token_hex(4)}")

    def make(
        self, *, engine: str, incarnation: int, lanes: int = 512, processes: int = 128
    ) -> None:
        """Make what was planned. Raises BoardError as create() does, and leaves nothing then."""
        parent = self.path.parent
        try:
            os.mkdir(self.path, 0o700)
            os.mkdir(self.path / layout.CLAIMS, 0o700)
            os.mkdir(self.path / layout.DUMPS, 0o700)
            _write(self.file, _header(engine, incarnation, processes, lanes))
        except OSError as error:
            self.remove()
            raise _explain(error, parent, layout.total_size(processes, lanes)) from error


def _header(engine: str, incarnation: int, processes: int, lanes: int) -> bytes:
    pid = os.getpid()
    return struct.pack(
        layout.HEADER_STRUCT,
        layout.MAGIC,
        layout.ABI,
        layout.HEADER_SIZE,
        processes,
        layout.PROCESS_SIZE,
        lanes,
        layout.LANE_SIZE,
        layout.NAMES,
        layout.NAME_SIZE,
        layout.total_size(processes, lanes),
        incarnation,
        pid,
        0,
        procfs.start_ticks(pid) or 0,
        time.monotonic_ns(),
        engine.encode()[:64],
    )


def _write(file: Path, header: bytes) -> None:
    size = struct.unpack_from("<Q", header, 40)[0]
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(file, flags, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
        os.pwrite(fd, header, 0)
    finally:
        os.close(fd)


def _explain(error: OSError, parent: Path, size: int) -> BoardError:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return BoardError(
            f"no room for the heartbeat board: {parent} has less than {size / 2**20:.1f} MiB free",
            hint=f"free space in {parent} (df -h {parent}), or give the container a larger --shm-size",
        )
    return BoardError(
        f"the heartbeat board cannot be made in {parent}: {error.strerror}",
        hint=f"check that {parent} exists, is a tmpfs and can be written by uid {os.geteuid()}",
    )
