"""Who is alive, as far as a writer needs to know. Reads /proc; never raises."""

from __future__ import annotations

import os


def start_ticks(pid: int) -> int:
    """The process's start time in clock ticks; 0 when it is gone or a zombie."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        raw = os.read(fd, 4096)
    except OSError:
        return 0
    finally:
        os.close(fd)
    fields = raw[raw.rfind(b")") + 2 :].split()  # comm may hold spaces and brackets
    if len(fields) < 20 or fields[0] in {b"Z", b"X"}:
        return 0
    return int(fields[19]) if fields[19].isdigit() else 0
