"""Who maps what: /proc/PID/maps, for the board and for shared memory that a kill leaves behind."""

from __future__ import annotations

import os
import re
import stat as stat_bits
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from stallwatch import procfs

SHM = "/dev/shm"  # noqa: S108 - POSIX shared memory lives there, by glibc's choice
_LINE = re.compile(rb"^\S+ \S+ \S+ ([0-9a-f]+):([0-9a-f]+) ([1-9]\d*) +(/.*)$", re.MULTILINE)
_DELETED = b" (deleted)"
_MAX = 32 << 20  # nobody honest has more; a hostile process must not fill our memory


@dataclass(frozen=True, slots=True)
class FileId:
    """A file's identity: its name may change, this does not."""

    dev: int
    inode: int


def identify(path: str) -> FileId | None:
    """The identity of a file, or None when it is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return FileId(found.st_dev, found.st_ino)


def mapped(pid: int, proc: Path = procfs.PROC) -> dict[FileId, str]:
    """The files a process maps, with the name the kernel gives them; empty when not readable."""
    try:
        with open(f"{proc}/{pid}/maps", "rb") as file:
            raw = file.read(_MAX)
    except OSError:
        return {}
    return dict(_parse(raw))


def _parse(raw: bytes) -> Iterator[tuple[FileId, str]]:
    last = b""
    for found in _LINE.finditer(raw):
        if found[3] == last:
            continue  # the segments of one library follow each other
        last = found[3]
        if not found[4].endswith(_DELETED):
            device = os.makedev(int(found[1], 16), int(found[2], 16))
            yield FileId(device, int(found[3])), os.fsdecode(found[4])


def maps_file(pid: int, file: FileId, proc: Path = procfs.PROC) -> bool:
    """True when the process maps that file."""
    return file in mapped(pid, proc)


def who_maps(
    files: Iterable[FileId], *, ignore: Iterable[int] = (), proc: Path = procfs.PROC
) -> dict[FileId, set[int]]:
    """Which living processes map any of the files. Reads the maps of all: rarely."""
    wanted, skip = frozenset(files), frozenset(ignore)
    found: dict[FileId, set[int]] = {}
    if not wanted:
        return found
    for pid in procfs.pids(proc):
        if pid not in skip:
            for file in wanted & mapped(pid, proc).keys():
                found.setdefault(file, set()).add(pid)
    return found


def shared_memory(pids: Iterable[int], proc: Path = procfs.PROC) -> dict[FileId, str]:
    """The files directly in /dev/shm that these processes map."""
    found: dict[FileId, str] = {}
    for pid in pids:
        found.update(
            (file, name) for file, name in mapped(pid, proc).items() if os.path.dirname(name) == SHM
        )
    return found


def unlink_unmapped(files: dict[FileId, str], proc: Path = procfs.PROC) -> tuple[str, ...]:
    """Remove those that nobody maps any more; returns their names.

    Only regular files of ours, still the same inode under that name: never through a symlink.
    """
    left = {file: name for file, name in files.items() if _is_ours(file, name)}
    in_use = who_maps(left, proc=proc)
    removed = []
    for file, name in left.items():
        if file in in_use or not _is_ours(file, name):
            continue
        try:
            os.unlink(name)
        except OSError:
            continue
        removed.append(name)
    return tuple(sorted(removed))


def _is_ours(file: FileId, name: str) -> bool:
    try:
        found = os.lstat(name)
    except OSError:
        return False
    return (
        stat_bits.S_ISREG(found.st_mode)
        and found.st_uid == os.geteuid()
        and (found.st_dev, found.st_ino) == (file.dev, file.inode)
    )
