"""The header of one safetensors file: where each tensor's bytes lie, checked against the file's length.

The reading itself is left to the safetensors library; the header is decoded here because its own error for
a file that was cut off names no tensor, and because a table may be mapped by place.
"""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from stallwatch_engine.checkpoint.errors import BadCheckpoint

WIDTHS: Final = {
    "F32": 4,
    "BF16": 2,
    "F16": 2,
    "I64": 8,
}  # bytes an element, of the formats read here
_MAX_HEADER: Final = 100 << 20  # the format's own limit


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor. `offset` counts bytes from the start of the file."""

    name: str
    path: Path
    shape: tuple[int, ...]
    dtype: str  # safetensors' word: F32, BF16, ...
    offset: int
    nbytes: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of the file. Raises BadCheckpoint for a file that is cut off or no safetensors file."""
    try:
        with path.open("rb") as file:
            length = os.fstat(file.fileno()).st_size
            lead = file.read(8)
            size = struct.unpack("<Q", lead)[0] if len(lead) == 8 else 0
            if not 2 <= size <= min(_MAX_HEADER, length - 8):
                raise BadCheckpoint(
                    "is cut off or no safetensors file: no whole header", file=str(path)
                )
            raw = file.read(size)
    except OSError as exc:
        raise BadCheckpoint(f"cannot be read ({exc.strerror})", file=str(path)) from exc
    try:
        entries = json.loads(raw)
    except ValueError as exc:
        raise BadCheckpoint(f"has a header that is no JSON ({exc})", file=str(path)) from exc
    if not isinstance(entries, dict):
        raise BadCheckpoint("has a header that is no JSON object", file=str(path))
    found = [
        _tensor(name, entry, path=path, start=8 + size)
        for name, entry in entries.items()
        if name != "__metadata__"
    ]
    for each in sorted(found, key=lambda tensor: tensor.offset):
        if each.offset + each.nbytes > length:
            raise BadCheckpoint(
                f"ends at byte {each.offset + each.nbytes}, and the file has only {length}: it is cut off",
                file=str(path),
                tensor=each.name,
            )
    return {each.name: each for each in found}


def _tensor(name: str, entry: Any, *, path: Path, start: int) -> TensorInfo:
    try:
        shape = tuple(_whole(n) for n in entry["shape"])
        begin, end = (_whole(n) for n in entry["data_offsets"])
        dtype = f"{entry['dtype']!s:.16}"
    except (KeyError, TypeError, ValueError) as exc:
        raise BadCheckpoint("has a damaged header entry", file=str(path), tensor=name) from exc
    if dtype not in WIDTHS:
        formats = ", ".join(WIDTHS)
        raise BadCheckpoint(
            f"is stored as {dtype}; this engine reads {formats}", file=str(path), tensor=name
        )
    if min(shape, default=0) < 0 or begin < 0 or end - begin != math.prod(shape) * WIDTHS[dtype]:
        raise BadCheckpoint(
            f"of shape {list(shape)} and type {dtype} is given {end - begin} bytes",
            file=str(path),
            tensor=name,
        )
    return TensorInfo(name, path, shape, dtype, start + begin, end - begin)


def _whole(value: Any) -> int:
    """JSON also knows 1.5, 1e999 and true."""
    if type(value) is not int:
        raise TypeError
    return value
