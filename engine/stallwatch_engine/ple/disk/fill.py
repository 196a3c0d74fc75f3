"""The first fill of a folder: one filler at a time, everything or nothing."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from stallwatch.heartbeat import Lane
from stallwatch_engine.ple.disk import record
from stallwatch_engine.ple.disk.record import Record, layer_file
from stallwatch_engine.ple.errors import AnotherCheckpoint, NoRoom
from stallwatch_engine.ple.spec import Bytes, LayerTable, TableSpec
from stallwatch_engine.streams.bounded import check_deadline

CHUNK = 16 << 20  # bytes of rows held in memory at a time
_LOCK_POLL_S = 0.05
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def locked(folder: Path, deadline: float, lane: Lane) -> Iterator[None]:
    """Alone with the folder. TimeoutError when another process fills it for longer than that."""
    check_deadline(deadline)
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with lane.phase("wait_disk_lock", cls="start"):
            while not _try_lock(fd):
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"{folder} is being filled by another process for too long")
                time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(fd)  # and with it the lock


def ensure(spec: TableSpec, folder: Path, lane: Lane, *, replace: bool) -> None:
    """Fill the folder unless it is complete. Call it locked.

    Raises AnotherCheckpoint, and NoRoom when the disk is full: then nothing is left of the attempt.
    """
    fingerprint = spec.fingerprint()
    found = record.read(folder)
    if found is not None and found.fingerprint == fingerprint:
        return
    if found is not None and not replace:
        raise AnotherCheckpoint(folder, found.fingerprint, fingerprint)
    record.remove(folder)
    sizes = tuple(layer.rows * row_bytes(spec, layer) for layer in spec.layers)
    try:
        _check_room(folder, sizes)
        for number, (layer, size) in enumerate(zip(spec.layers, sizes, strict=True)):
            _fill_layer(spec, layer, layer_file(folder, number), size, lane)
        record.write(folder, Record(fingerprint, sizes))
    except OSError as error:
        _clear(folder, len(sizes))
        if error.errno in _FULL and not isinstance(error, NoRoom):
            raise NoRoom(error.errno, _sentence(folder, sum(sizes))) from error
        raise
    except BaseException:
        _clear(folder, len(sizes))
        raise


def row_bytes(spec: TableSpec, layer: LayerTable) -> int:
    """Bytes of one stored row: codes, then scales."""
    dim = spec.ngram.head_dim
    return layer.code_bytes(dim) + layer.scale_bytes(dim)


def _fill_layer(  # noqa: PLR0917
    spec: TableSpec, layer: LayerTable, target: Path, size: int, lane: Lane
) -> None:
    partial = target.with_suffix(".partial")
    fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
        at = 0
        for rows in _rows(spec, layer, lane):
            at += _write(fd, rows, at)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(partial, target)


def _rows(spec: TableSpec, layer: LayerTable, lane: Lane) -> Iterator[Bytes]:
    """All rows in order, a few at a time, codes and scales side by side."""
    dim = spec.ngram.head_dim
    codes_size, scales_size = layer.code_bytes(dim), layer.scale_bytes(dim)
    step = max(1, CHUNK // (codes_size + scales_size))
    for number, part in enumerate(layer.parts):
        with lane.phase("fill_shard", cls="start", shard=number, rows=part.rows):
            for lo in range(0, part.rows, step):
                count = min(step, part.rows - lo)
                rows = np.empty((count, codes_size + scales_size), dtype=np.uint8)
                codes = part.codes.read(lo * codes_size, count * codes_size)
                rows[:, :codes_size] = codes.reshape(count, codes_size)
                if part.scales is not None:
                    scales = part.scales.read(lo * scales_size, count * scales_size)
                    rows[:, codes_size:] = scales.reshape(count, scales_size)
                yield rows
                lane.progress(rows.nbytes)


def _write(fd: int, rows: Bytes, offset: int) -> int:
    view, done = rows.data.cast("B"), 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)
    return done


def _check_room(folder: Path, sizes: tuple[int, ...]) -> None:
    disk = os.statvfs(folder)
    if sum(sizes) > disk.f_bavail * disk.f_frsize:
        raise NoRoom(errno.ENOSPC, _sentence(folder, sum(sizes)))


def _sentence(folder: Path, size: int) -> str:
    return (
        f"no room for {size / 2**20:.0f} MiB of PLE tables in {folder}: free some, or name another"
    )


def _clear(folder: Path, layers: int) -> None:
    """Nothing half-believed: neither the files nor their partial forms."""
    for number in range(layers):
        file = layer_file(folder, number)
        for path in (file, file.with_suffix(".partial")):
            path.unlink(missing_ok=True)
    (folder / f"{record.FILE}.partial").unlink(missing_ok=True)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
