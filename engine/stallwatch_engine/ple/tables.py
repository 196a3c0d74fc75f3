"""Tables in this process's memory, and the rows of a packed step from any kind of table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from stallwatch.heartbeat import Lane
from stallwatch_engine.ple.shape import DTYPES
from stallwatch_engine.ple.spec import LayerTable, Part, Place, TableSpec
from stallwatch_kernels.ple.gather import Gather
from stallwatch_kernels.ple.rowids import RowIds
from stallwatch_kernels.ple.table import Format, Shard, Table
from stallwatch_kernels.tensors import Array

CODES: dict[Format, type[np.generic]] = {
    Format.FP32: np.float32,
    Format.BF16: np.uint16,
    Format.FP8: np.uint8,
    Format.INT8: np.int8,
    Format.INT4: np.uint8,
    Format.NVFP4: np.uint8,
}
SCALES: dict[str, type[np.generic]] = {
    "float32": np.float32,
    "float16": np.float16,
    "float8_e4m3": np.uint8,
}
_CHUNK = 64 << 20


class LayerRows(Protocol):
    """Gathers rows int64[T, H] of one layer into [T, E]."""

    def __call__(self, rows: torch.Tensor, out: torch.Tensor) -> object: ...


class NgramRows:
    """A RowSource: hashes a packed step for each layer and gathers from that layer's table."""

    def __init__(self, spec: TableSpec, gathers: Sequence[LayerRows]) -> None:
        numbers = spec.ngram
        self.layers = tuple(layer.name for layer in spec.layers)
        self.dtype = spec.dtype
        self.embed = numbers.embed_dim
        self.ngram = numbers.ngram_size
        hashes = [RowIds(spec.layout(layer)) for layer in spec.layers]
        self._layers = list(zip(hashes, gathers, strict=True))

    def gather(
        self,
        ids: torch.Tensor,
        query_start_loc: torch.Tensor,
        context: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        for (row_ids, gather), target in zip(self._layers, out, strict=True):
            gather(row_ids(ids, query_start_loc, context), target)


def load(spec: TableSpec, lane: Lane) -> NgramRows:
    """Read all tables into memory. TableChanged for a file that is too short, KernelRefused for a bad table."""
    gathers = [Gather(_table(spec, layer, lane), DTYPES[spec.dtype]) for layer in spec.layers]
    return NgramRows(spec, gathers)


def open_resident(values: Mapping[str, Any], lane: Lane) -> NgramRows:
    """load() for the offload process; `values` is TableSpec.describe()."""
    return load(TableSpec.parse(values), lane)


def as_codes(layer: LayerTable, raw: Array, dim: int) -> Array:
    """Rows of stored bytes as the array that a Table takes."""
    codes: Array = raw.view(CODES[Format(layer.format)])
    return codes.reshape(
        -1, dim // 2 if Format(layer.format) in {Format.INT4, Format.NVFP4} else dim
    )


def as_scales(layer: LayerTable, raw: Array, dim: int) -> Array:
    """The same for the scales of a grouped format."""
    scales: Array = raw.view(SCALES[layer.scale_dtype])
    return scales.reshape(-1, -(-dim // layer.group))


def _table(spec: TableSpec, layer: LayerTable, lane: Lane) -> Table:
    dim = spec.ngram.head_dim
    shards = []
    for number, part in enumerate(layer.parts):
        with lane.phase("load_shard", cls="start", shard=number, bytes=_nbytes(part)):
            codes = as_codes(layer, _read(part.codes, lane), dim)
            scales = part.scales and as_scales(layer, _read(part.scales, lane), dim)
        shards.append(Shard(codes, scales, part.factor))
    return Table(Format(layer.format), dim, shards, group=layer.group)


def _nbytes(part: Part) -> int:
    return part.codes.nbytes + (part.scales.nbytes if part.scales else 0)


def _read(place: Place, lane: Lane) -> Array:
    """The bytes of a place, in pieces, so that a slow disk is seen to make progress."""
    data = np.empty(place.nbytes, dtype=np.uint8)
    for start in range(0, place.nbytes, _CHUNK):
        size = min(_CHUNK, place.nbytes - start)
        data[start : start + size] = place.read(start, size)
        lane.progress(size)
    return data
