"""A checkpoint's PLE tables as the places that a PLE backend reads, maps, or tells another process."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

from stallwatch_engine.checkpoint.errors import BadCheckpoint
from stallwatch_engine.checkpoint.expected import layer_prefix
from stallwatch_engine.checkpoint.view import CheckpointView, PleTable
from stallwatch_engine.ple.spec import LayerTable, Part, Place, TableSpec
from stallwatch_kernels.ple.table import Format

_FORMATS: Final = {"F32": Format.FP32, "BF16": Format.BF16}


def table_spec(view: CheckpointView, *, dtype: str) -> TableSpec | None:
    """All PLE tables in order of depth, or None without PLE layers; rows come out in `dtype`.

    Raises BadCheckpoint for a table whose parts differ in type, or are of one that backends do not read.
    """
    ple = view.config.ple
    if ple is None:
        return None
    layers = tuple(_layer(view.table(layer), ordinal) for ordinal, layer in enumerate(ple.layers))
    return TableSpec(numbers=asdict(ple.numbers), dtype=dtype, layers=layers)


def _layer(table: PleTable, ordinal: int) -> LayerTable:
    stored = table.parts[0].info.dtype
    for part in table.parts:
        if part.info.dtype != stored or stored not in _FORMATS:
            raise BadCheckpoint(
                f"is {part.info.dtype}; a table is all F32 or all BF16",
                file=str(part.info.path),
                tensor=part.info.name,
            )
    parts = tuple(
        Part(part.rows, Place(str(part.info.path), part.info.offset, part.info.nbytes))
        for part in table.parts
    )
    return LayerTable(f"{layer_prefix(table.layer)}.ple", ordinal, _FORMATS[stored].value, parts)
