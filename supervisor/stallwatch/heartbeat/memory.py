"""Opening a board that somebody else made: map it, or say no. Never raises."""

from __future__ import annotations

import mmap
import os
import stat
import struct

from stallwatch.heartbeat import layout


class BoardMemory:
    """One mapped board file and the folder around it."""

    __slots__ = (
        "bytes",
        "claims",
        "folder",
        "incarnation",
        "lanes",
        "processes",
        "supervisor_pid",
        "supervisor_ticks",
        "words",
    )

    def __init__(self, folder: str, mapped: mmap.mmap, header: dict[str, int]) -> None:
        self.folder = folder
        self.claims = f"{folder}/{layout.CLAIMS}"
        self.bytes = memoryview(mapped)
        # "l" is the format that CPython stores fastest (it alone has a short path for 64-bit ints).
        self.words = self.bytes.cast("l")
        self.processes = header["process_slots"]
        self.lanes = header["lane_slots"]
        self.incarnation = header["incarnation"]
        self.supervisor_pid = header["supervisor_pid"]
        self.supervisor_ticks = header["supervisor_ticks"]


def open_board(folder: str) -> BoardMemory | None:
    """The board in that folder, mapped; None when there is none that can be used."""
    try:
        return _open(folder)
    except (OSError, ValueError, struct.error):
        return None


def _open(folder: str) -> BoardMemory | None:
    if not folder.startswith("/"):
        return None
    # O_NONBLOCK: a device in its place must not hang the engine.
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(f"{folder}/{layout.BOARD_FILE}", flags)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid not in {0, os.geteuid()}:
            return None
        header = read_header(os.pread(fd, layout.HEADER_SIZE, 0))
        # A hole would be a SIGBUS at the first store once /dev/shm is full.
        room = min(found.st_size, found.st_blocks * 512)
        if header is None or room < header["total_size"]:
            return None
        mapped = mmap.mmap(fd, header["total_size"])
    finally:
        os.close(fd)
    return BoardMemory(folder, mapped, header)


def read_header(raw: bytes) -> dict[str, int] | None:
    """The checked numbers of a header; None when it is no board of this ABI."""
    if len(raw) < layout.HEADER_SIZE:
        return None
    values = dict(
        zip(layout.HEADER_FIELDS, struct.unpack_from(layout.HEADER_STRUCT, raw), strict=True)
    )
    expected = {
        "magic": layout.MAGIC,
        "abi": layout.ABI,
        "header_size": layout.HEADER_SIZE,
        "process_size": layout.PROCESS_SIZE,
        "lane_size": layout.LANE_SIZE,
        "names": layout.NAMES,
        "name_size": layout.NAME_SIZE,
    }
    processes, lanes = values["process_slots"], values["lane_slots"]
    if any(values[key] != value for key, value in expected.items()):
        return None
    if not (0 < processes <= 4096 and 0 < lanes <= 16384):
        return None
    if values["total_size"] != layout.total_size(processes, lanes):
        return None
    return {key: value for key, value in values.items() if isinstance(value, int)}
