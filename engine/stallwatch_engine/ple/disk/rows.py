"""Rows from a file: each different row is read once, in order, into a small table that is then gathered.

By pread, not by a mapping: a file that is cut short under a mapping kills the reader with SIGBUS, and a
short read is an error with a name. The page cache is the same.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stallwatch.heartbeat import Lane
from stallwatch_engine.ple import numa
from stallwatch_engine.ple.disk import fill
from stallwatch_engine.ple.disk.record import layer_file
from stallwatch_engine.ple.errors import TableChanged
from stallwatch_engine.ple.shape import DTYPES
from stallwatch_engine.ple.spec import Bytes, LayerTable, TableSpec
from stallwatch_engine.ple.tables import NgramRows, as_codes, as_scales
from stallwatch_kernels.errors import BadIndex
from stallwatch_kernels.ple.gather import Gather
from stallwatch_kernels.ple.table import Format, Shard, Table
from stallwatch_kernels.tensors import Array

ROOM = 4096  # different rows gathered at a time
READERS = 8  # a cold disk wants many reads in flight
_LEAST = 64  # rows a reader must have to be worth waking
LOCK_TIMEOUT_S = 1800.0
PREFAULT_LIMIT_S = 1800.0

log = logging.getLogger("stallwatch.offload")


class FileRows:
    """One layer's file as LayerRows."""

    def __init__(self, spec: TableSpec, layer: LayerTable, path: Path, readers: int) -> None:
        dim = spec.ngram.head_dim
        self.path = path
        self._rows = layer.rows
        self._row_bytes = fill.row_bytes(spec, layer)
        self._code_bytes = layer.code_bytes(dim)
        self._heads = spec.ngram.heads
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._end = weakref.finalize(self, os.close, self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)
        # Rows of shards with different factors must stay apart: one small shard for each factor.
        factors, self._kinds = np.unique(
            np.array([part.factor for part in layer.parts], dtype=np.float32), return_inverse=True
        )
        self._first_rows = np.cumsum([0, *(part.rows for part in layer.parts)])[:-1]
        room = ROOM * len(factors)
        self._codes = np.zeros((room, self._code_bytes), dtype=np.uint8)
        self._scales = np.zeros((room, self._row_bytes - self._code_bytes), dtype=np.uint8)
        self._gather = Gather(self._small(layer, dim, factors), DTYPES[spec.dtype])
        self._pool = ThreadPoolExecutor(readers, thread_name_prefix="ple-disk") if readers else None
        if self._pool is not None:  # all of them now: no step starts a thread
            together = threading.Barrier(readers)
            list(self._pool.map(lambda _: together.wait(), range(readers)))

    def __call__(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Gather rows int64[T, H] into [T, E]. TableChanged when the file is shorter than it was."""
        wanted = rows.numpy()
        step = max(1, ROOM // self._heads)
        for lo in range(0, len(wanted), step):
            self._some(wanted[lo : lo + step], out[lo : lo + step])

    def close(self) -> None:
        """Close the file and end the readers."""
        if self._pool is not None:
            self._pool.shutdown()
        self._end()

    def _some(self, wanted: Array, out: torch.Tensor) -> None:
        different, back = np.unique(wanted, return_inverse=True)
        if different.size and not 0 <= different[0] <= different[-1] < self._rows:
            raise BadIndex("ple.disk", "rows", f"lie outside of the table of {self._rows} rows")
        raw = self._read(different)
        kinds = self._kinds[np.searchsorted(self._first_rows, different, side="right") - 1]
        places = np.empty(len(different), dtype=np.int64)
        for kind in np.unique(kinds):
            mine = kinds == kind
            start, count = int(kind) * ROOM, int(mine.sum())
            self._codes[start : start + count] = raw[mine, : self._code_bytes]
            self._scales[start : start + count] = raw[mine, self._code_bytes :]
            places[mine] = np.arange(start, start + count)
        self._gather(torch.from_numpy(places[back].reshape(wanted.shape)), out)

    def _read(self, rows: Array) -> Bytes:
        """uint8[rows, row bytes]."""
        raw = np.empty((len(rows), self._row_bytes), dtype=np.uint8)
        parts = min(READERS, len(rows) // _LEAST) if self._pool is not None else 1
        if self._pool is None or parts <= 1:
            self._read_part(rows, raw)
            return raw
        cuts = np.array_split(np.arange(len(rows)), parts)
        futures = [self._pool.submit(self._read_part, rows[c], raw[c[0] : c[-1] + 1]) for c in cuts]
        for error in [future.exception() for future in futures]:  # all end before any is raised
            if error is not None:
                raise error
        return raw

    def _read_part(self, rows: Array, raw: Bytes) -> None:
        size, fd = self._row_bytes, self._fd
        view = raw.data.cast("B")
        for n, row in enumerate(rows.tolist()):
            got = os.preadv(fd, [view[n * size : (n + 1) * size]], row * size)
            if got != size:
                raise TableChanged(f"{self.path} was cut short while it was served (row {row})")

    def _small(self, layer: LayerTable, dim: int, factors: Array) -> Table:
        shards = []
        for n, factor in enumerate(factors.tolist()):
            codes = as_codes(layer, self._codes[n * ROOM : (n + 1) * ROOM], dim)
            scales = self._scales[n * ROOM : (n + 1) * ROOM]
            shards.append(
                Shard(codes, as_scales(layer, scales, dim) if layer.scale_dtype else None, factor)
            )
        return Table(Format(layer.format), dim, shards, group=layer.group)


class DiskRows(NgramRows):
    """All layers from files of one folder."""

    def __init__(self, spec: TableSpec, files: list[FileRows]) -> None:
        super().__init__(spec, files)
        self._files = files
        self.paths = tuple(file.path for file in files)

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()


def open_disk(
    spec: TableSpec,
    folder: Path,
    lane: Lane,
    *,
    replace: bool = False,
    readers: int = READERS,
    deadline: float | None = None,
) -> DiskRows:
    """Fill the folder if need be, and open it. See fill.ensure for what is raised."""
    folder.mkdir(parents=True, exist_ok=True)
    limit = time.monotonic() + LOCK_TIMEOUT_S if deadline is None else deadline
    with fill.locked(folder, limit, lane):
        fill.ensure(spec, folder, lane, replace=replace)
        files = [
            FileRows(spec, layer, layer_file(folder, number), readers)
            for number, layer in enumerate(spec.layers)
        ]
    return DiskRows(spec, files)


def open_for_offload(values: Mapping[str, Any], lane: Lane) -> DiskRows:
    """open_disk() for the offload process; `values`: folder, replace, prefault, and tables (TableSpec.describe())."""
    spec = TableSpec.parse(values["tables"])
    rows = open_disk(spec, Path(values["folder"]), lane, replace=bool(values["replace"]))
    if values["prefault"]:
        with lane.phase("prefault", cls="start", limit=PREFAULT_LIMIT_S):
            for path in rows.paths:
                # Mapped for this moment only: the rows are read from the cache that it fills.
                step = numa.prefault(np.memmap(path, np.uint8, "r"), lane.progress)
                log.info("%s: %s", path.name, step)
    return rows
