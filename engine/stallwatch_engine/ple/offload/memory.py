"""The block of shared memory of one rank: inputs, rows and stamps of each step in flight.

An anonymous memory file, allocated at once and sealed against shrinking, so that neither a full
/dev/shm nor the other side can turn an access into SIGBUS, and nothing is left behind by any death.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from stallwatch_engine.ple.errors import NoRoom
from stallwatch_engine.ple.shape import PleShape

# int64 words a slot: the step whose rows it holds, the newest one consumed from it, the newest one
# that a forward waits for.
STAMPS = 8
ROWS_OF, CONSUMED, WANTED = 0, 1, 2
_ALIGN = 4096
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True)
class Layout:
    """Byte offsets inside one slot, each on a page of its own; `size` is that of all slots."""

    stamps: int
    ids: int
    starts: int
    context: int
    rows: int
    slot: int
    size: int

    @classmethod
    def of(cls, shape: PleShape) -> Layout:
        sizes = (
            STAMPS * 8,
            shape.max_tokens * 4,
            (shape.max_requests + 1) * 4,
            shape.max_requests * (shape.ngram - 1) * 4,
            len(shape.layers) * shape.max_tokens * shape.embed * shape.torch_dtype.itemsize,
        )
        offsets = [0]
        for size in sizes:
            offsets.append(offsets[-1] + -(-size // _ALIGN) * _ALIGN)
        stamps, ids, starts, context, rows, slot = offsets
        return cls(stamps, ids, starts, context, rows, slot, slot * shape.max_in_flight)


class Slot:
    """The tensors of one slot, over the shared block."""

    def __init__(self, block: mmap.mmap, layout: Layout, shape: PleShape, number: int) -> None:
        base = number * layout.slot

        def tensor(offset: int, dtype: torch.dtype, *size: int) -> torch.Tensor:
            count = torch.Size(size).numel()
            flat = torch.frombuffer(block, dtype=dtype, count=count, offset=base + offset)
            return flat.view(size)

        older = shape.ngram - 1
        start = base + layout.stamps
        self.stamps = memoryview(block)[start : start + STAMPS * 8].cast("q")
        self.ids = tensor(layout.ids, torch.int32, shape.max_tokens)
        self.starts = tensor(layout.starts, torch.int32, shape.max_requests + 1)
        self.context = tensor(layout.context, torch.int32, shape.max_requests, older)
        rows = (len(shape.layers), shape.max_tokens, shape.embed)
        self.rows = tensor(layout.rows, shape.torch_dtype, *rows)


class SharedMemory:
    """One rank's slots, mapped. Both sides map the same file; the last to go frees it."""

    def __init__(self, fd: int, shape: PleShape) -> None:
        layout = Layout.of(shape)
        self.size = layout.size
        block = mmap.mmap(fd, layout.size)
        self.slots = [Slot(block, layout, shape, n) for n in range(shape.max_in_flight)]


def allocate(shape: PleShape) -> int:
    """The descriptor of a new, fully allocated and sealed block; the caller closes it.

    Raises NoRoom before or instead of running into SIGBUS or the OOM killer.
    """
    size = Layout.of(shape).size
    check_memory(size, "the PLE buffers of one rank")
    fd = os.memfd_create("stallwatch-ple", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        slots = SharedMemory(fd, shape).slots
        for slot in slots:
            for word in range(STAMPS):
                slot.stamps[word] = -1
    except OSError as error:
        os.close(fd)
        if error.errno in {errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG}:
            raise NoRoom(error.errno, _no_room("the PLE buffers of one rank", size)) from error
        raise
    return fd


def check_memory(size: int, what: str) -> None:
    """NoRoom when the host has less than that many bytes to give."""
    free = available()
    if size > free:
        raise NoRoom(errno.ENOMEM, f"{_no_room(what, size)}, and {free / 2**20:.0f} MiB are free")


def available(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes that the host can give without swapping."""
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(errno.ENODATA, f"{meminfo} has no MemAvailable")


def _no_room(what: str, size: int) -> str:
    return (
        f"no memory for {what}: {size / 2**20:.0f} MiB are needed "
        "(lower max_tokens, or give the host or container more memory)"
    )


def is_sealed(fd: int) -> bool:
    """Whether the file behind a descriptor can no longer shrink."""
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # no memory file
        return False
