"""Who owns which slot: one file per slot, made with O_CREAT|O_EXCL.

A file holds the pid, a space, the start ticks and a newline. Check-then-write in shared memory was seen to give one slot to two
processes; the file system decides atomically instead.
"""

from __future__ import annotations

import fcntl
import os
import time

from stallwatch.heartbeat.proc import start_ticks

_STEAL_LOCK = ".steal"
# Looking for dead owners reads every claim. Two thousand threads that each ask for a lane of a full
# board must not all do so: the process would do nothing else.
_FULL_NS = 200_000_000
_PATIENT = 16  # looks in vain, one soon after the other, before that rule holds
_in_vain: dict[tuple[str, str], tuple[int, int]] = {}  # table -> how many, until when they count


def claim(folder: str, prefix: str, count: int) -> int:
    """The lowest free slot, now ours; -1 when the table is full or the folder unusable.

    A slot whose owner is dead is taken over only when no slot is free.
    """
    now = time.monotonic_ns()
    vain, until = _in_vain.get((folder, prefix), (0, 0))
    if vain >= _PATIENT and now < until:
        return -1
    mine = f"{os.getpid()} {start_ticks(os.getpid())}\n".encode()
    try:
        taken = set(os.listdir(folder))
        for slot in range(count):
            name = f"{prefix}{slot}"
            if name not in taken and _create(folder, name, mine):
                return slot
        slot = _steal(folder, prefix, count, mine)
        if slot < 0:
            # From its end: on a busy machine one look may take longer than the time it counts for.
            end = time.monotonic_ns()
            lasts = max(_FULL_NS, end - now)
            _in_vain[folder, prefix] = (vain + 1 if now < until else 1, end + lasts)
        return slot
    except OSError:
        return -1


def release(folder: str, prefix: str, slot: int) -> None:
    """Give a slot back. Only its owner may call this."""
    _in_vain.pop((folder, prefix), None)
    try:
        os.unlink(f"{folder}/{prefix}{slot}")
    except OSError:
        pass


def owner(path: str) -> tuple[int, int] | None:
    """(pid, start ticks) in a claim file; None when it cannot be told, which means: hands off."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        raw = os.read(fd, 64)
    except OSError:
        return None
    finally:
        os.close(fd)
    parts = raw.split()
    # No newline: its maker is between open and write. It may be stopped there, so it keeps the
    # slot; one slot is lost if it was killed there, which is better than a slot owned twice.
    if len(parts) != 2 or not raw.endswith(b"\n") or not all(p.isdigit() for p in parts):
        return None
    return int(parts[0]), int(parts[1])


def _create(folder: str, name: str, content: bytes) -> bool:
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    try:
        fd = os.open(f"{folder}/{name}", flags, 0o600)
    except FileExistsError:
        return False
    try:
        os.write(fd, content)
    finally:
        os.close(fd)
    return True


def _steal(folder: str, prefix: str, count: int, mine: bytes) -> int:
    """Take over a dead owner's slot.

    Two thieves could both read a dead owner, and the second would unlink the first one's new claim;
    so the check, the unlink and the create happen under one flock, which the kernel drops when its
    holder dies. Not waited for: a stopped thief must not hang an engine.
    """
    lock = os.open(f"{folder}/{_STEAL_LOCK}", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        for _ in range(50):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                os.sched_yield()
        else:
            return -1
        for slot in range(count):
            name = f"{prefix}{slot}"
            held = owner(f"{folder}/{name}")
            if held is None or start_ticks(held[0]) == held[1]:
                continue
            os.unlink(f"{folder}/{name}")
            if _create(folder, name, mine):
                return slot
        return -1
    finally:
        os.close(lock)
