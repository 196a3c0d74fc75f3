"""Opening the backend that the settings name, and ending everything that belongs to it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from stallwatch.heartbeat import Lane
from stallwatch_engine.faults import Faults
from stallwatch_engine.ple.disk.rows import open_disk
from stallwatch_engine.ple.offload.client import OffloadBackend
from stallwatch_engine.ple.offload.process import OffloadProcess
from stallwatch_engine.ple.protocol import PleBackend, RowSource
from stallwatch_engine.ple.resident import ResidentBackend
from stallwatch_engine.ple.shape import PleShape
from stallwatch_engine.ple.spec import TableSpec
from stallwatch_engine.ple.tables import load


class Where(StrEnum):
    """Who holds the tables."""

    RESIDENT = "resident"  # this process, in memory
    PROCESS = "process"  # a process of its own
    DISK = "disk"  # files, read row by row


@dataclass(frozen=True, slots=True)
class PleSettings:
    """`folder` holds the files of `disk`; with `process` it makes that process read from them.

    `prefault` lets it read those once while it starts, if they fit into memory with headroom.
    `replace` gives away a folder with another checkpoint's tables. `cpus` is a cpulist for the process.
    `start_timeout_s` bounds loading or filling.
    """

    where: Where = Where.RESIDENT
    folder: Path | None = None
    replace: bool = False
    prefault: bool = True
    cpus: str = ""
    start_timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        if self.where is Where.DISK and self.folder is None:
            raise ValueError("PLE tables on disk need a folder")


@contextmanager
def open_backend(
    settings: PleSettings, tables: TableSpec, shape: PleShape, *, lane: Lane, faults: Faults
) -> Iterator[PleBackend]:
    """A backend that serves, for as long as the context lasts.

    `lane` shows loading and filling in this process; the offload process has a lane of its own.
    """
    deadline = time.monotonic() + settings.start_timeout_s
    with ExitStack() as stack:
        if settings.where is Where.PROCESS:
            process = OffloadProcess(*_command(settings, tables), cpus=settings.cpus)
            stack.callback(process.close)
            remote = OffloadBackend(process, shape, faults=faults)
            stack.callback(remote.close)
            with lane.phase("wait_offload", cls="start", limit=settings.start_timeout_s):
                remote.serving(deadline)
            yield remote
            return
        source: RowSource
        with lane.phase("load_table", cls="start", limit=settings.start_timeout_s):
            if settings.where is Where.DISK and settings.folder is not None:
                disk = open_disk(
                    tables, settings.folder, lane, replace=settings.replace, deadline=deadline
                )
                stack.callback(disk.close)
                source = disk
            else:
                source = load(tables, lane)
            resident = ResidentBackend(source, shape)
        stack.callback(resident.close)
        yield resident


def _command(settings: PleSettings, tables: TableSpec) -> tuple[str, dict[str, object]]:
    """The factory that the offload process calls, and its argument."""
    if settings.folder is None:
        return "stallwatch_engine.ple.tables:open_resident", tables.describe()
    values = {
        "tables": tables.describe(),
        "folder": str(settings.folder),
        "replace": settings.replace,
        "prefault": settings.prefault,
    }
    return "stallwatch_engine.ple.disk.rows:open_for_offload", values
