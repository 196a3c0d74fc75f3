"""Where the tables' bytes lie, in plain values: what one process tells another in JSON."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stallwatch_engine.ple.errors import TableChanged
from stallwatch_kernels.ple.layout import NgramLayout, NgramNumbers, ngram_layout
from stallwatch_kernels.ple.table import Format

Bytes = npt.NDArray[np.uint8]

_SAMPLE = 4096
_WIDTHS = {"": 0, "float32": 4, "float16": 2, "float8_e4m3": 1}


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes of a file."""

    path: str
    offset: int
    nbytes: int

    def read(self, start: int = 0, nbytes: int = -1) -> Bytes:
        """uint8 of the whole place, or of a part of it. TableChanged when the file is shorter."""
        size = self.nbytes - start if nbytes < 0 else nbytes
        if not 0 <= start <= start + size <= self.nbytes:
            raise IndexError(f"bytes {start}:{start + size} of {self.nbytes} in {self.path}")
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return pread(fd, size, self.offset + start, self.path)
        finally:
            os.close(fd)


def pread(fd: int, size: int, offset: int, path: str) -> Bytes:
    """uint8[size] from that place. TableChanged when the file ends before."""
    data = np.empty(size, dtype=np.uint8)
    view, done = data.data, 0
    while done < size:
        got = os.preadv(fd, [view[done:]], offset + done)
        if got == 0:
            end = os.fstat(fd).st_size
            raise TableChanged(
                f"{path} ends at byte {end}; {offset + size - end} more were expected"
            )
        done += got
    return data


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive rows: codes, scales of the grouped formats, one factor."""

    rows: int
    codes: Place
    scales: Place | None = None
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class LayerTable:
    """One PLE layer's table. `scale_dtype` is empty for formats without scales."""

    name: str
    ordinal: int
    format: str
    parts: tuple[Part, ...]
    group: int = 16
    scale_dtype: str = ""

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    def code_bytes(self, dim: int) -> int:
        """Stored bytes of a row's codes."""
        fmt = Format(self.format)
        if fmt in {Format.INT4, Format.NVFP4}:
            return dim // 2
        return dim * {Format.FP32: 4, Format.BF16: 2}.get(fmt, 1)

    def scale_bytes(self, dim: int) -> int:
        """Stored bytes of a row's scales."""
        return -(-dim // self.group) * _WIDTHS[self.scale_dtype]


@dataclass(frozen=True, slots=True)
class TableSpec:
    """All tables of a model. `dtype` is that of the rows that come out, `numbers` NgramNumbers' fields."""

    numbers: Mapping[str, int]
    dtype: str
    layers: tuple[LayerTable, ...]

    @property
    def ngram(self) -> NgramNumbers:
        return NgramNumbers(**self.numbers)

    def layout(self, layer: LayerTable) -> NgramLayout:
        return ngram_layout(self.ngram, layer.ordinal)

    def describe(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**asdict(self), "numbers": dict(self.numbers)}

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> TableSpec:
        """From describe()'s values; TypeError or KeyError for anything else."""
        layers = tuple(
            LayerTable(**{**layer, "parts": tuple(_part(part) for part in layer["parts"])})
            for layer in values["layers"]
        )
        return cls(dict(values["numbers"]), values["dtype"], layers)

    def fingerprint(self) -> str:
        """Hex that tells one checkpoint's tables from another's: formats, sizes, and samples of each part.

        Paths do not count: a moved checkpoint is the same one.
        """
        digest = hashlib.sha256()
        digest.update(json.dumps(dict(self.numbers), sort_keys=True).encode())
        for layer in self.layers:
            about = [layer.name, layer.ordinal, layer.format, layer.group, layer.scale_dtype]
            digest.update(json.dumps(about).encode())
            for part in layer.parts:
                digest.update(json.dumps([part.rows, part.factor]).encode())
                for place in filter(None, (part.codes, part.scales)):
                    digest.update(_samples(place))
        return digest.hexdigest()


def _part(values: Mapping[str, Any]) -> Part:
    scales = values["scales"]
    codes = Place(**values["codes"])
    return Part(values["rows"], codes, Place(**scales) if scales else None, values["factor"])


def _samples(place: Place) -> bytes:
    size = min(_SAMPLE, place.nbytes)
    starts = sorted({0, (place.nbytes - size) // 2, place.nbytes - size})
    return b"".join(place.read(start, size).tobytes() for start in starts)
