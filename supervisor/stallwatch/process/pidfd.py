"""pidfds: the only names of processes that cannot come to mean somebody else."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
from dataclasses import dataclass
from pathlib import Path

from stallwatch import procfs

# struct pidfd_info, first version (include/uapi/linux/pidfd.h): mask, cgroupid, then pid, tgid,
# ppid, eight ids and exit_code. The exit code is kept from 6.15 on; before, the mask says no.
_INFO = struct.Struct("<QQ11Ii")
_GET_INFO = (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11
_INFO_EXIT = 1 << 3


@dataclass(frozen=True, slots=True)
class Status:
    """How a process ended: an exit code, or the signal that ended it."""

    code: int | None = None
    signal: int | None = None


def decode(wait_status: int) -> Status:
    """A wait status as the kernel keeps it."""
    ended_by = wait_status & 0x7F
    return Status(signal=ended_by) if ended_by else Status(code=(wait_status >> 8) & 0xFF)


def open_exact(pid: int, ticks: int, proc: Path = procfs.PROC) -> int | None:
    """A pidfd of that very process, or None when it is gone (the pid may be another's by now)."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return None
    # Checked after the opening: from here on the descriptor, not the number, is the name.
    if procfs.start_ticks(pid, proc) != ticks:
        os.close(fd)
        return None
    return fd


def send(fd: int, number: int) -> bool:
    """Signal the process; False when it is gone or not ours to signal."""
    try:
        signal.pidfd_send_signal(fd, number)
    except OSError:
        return False
    return True


def exit_info(fd: int) -> Status | None:
    """The exit status of a process that somebody else reaped; None when the kernel cannot say."""
    buffer = bytearray(_INFO.size)
    struct.pack_into("<Q", buffer, 0, _INFO_EXIT)
    try:
        fcntl.ioctl(fd, _GET_INFO, buffer, True)
    except OSError:  # ENOTTY: before 6.13. ESRCH: reaped, and before 6.15.
        return None
    fields = _INFO.unpack(buffer)
    return decode(fields[-1]) if fields[0] & _INFO_EXIT else None


def zombie_status(pid: int, ticks: int, proc: Path = procfs.PROC) -> Status | None:
    """The exit status of a zombie that its parent has not reaped: field 52 of stat."""
    try:
        raw = (proc / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    found = procfs.parse_stat(raw)
    if found is None or found.start_ticks != ticks or found.state not in "ZX":
        return None
    fields = raw[raw.rfind(b")") + 2 :].split()
    # Zero also stands for "you may not know"; an exit code of 0 there proves nothing.
    return decode(int(fields[49])) if len(fields) > 49 and fields[49] != b"0" else None
