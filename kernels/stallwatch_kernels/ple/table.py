"""Stored n-gram tables: six formats, in RAM or mapped from files, whole or in shards.

A row of `dim` elements is stored as

| format | codes, per row | scales, per row | an element |
|---|---|---|---|
| fp32, bf16 | dim | none | the code |
| fp8 | dim E4M3 | none | code * global |
| int8 | dim | one fp32 or fp16 per group | code * scale |
| int4 | two a byte, low nibble first | one fp16 per group of 16 | (nibble - 8) * scale |
| nvfp4 | two E2M1 a byte, low nibble first | one E4M3 per group of 16 | (code * scale) * global |

The global factor is one fp32 per shard. Every product is rounded once to fp32 (code * scale of nvfp4 is
exact). int8 has no published layout; this one is ours: symmetric, in groups of 16, or one group a row
(`group=dim`). The last group of a row may be shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch

from stallwatch_kernels.errors import BadDtype, BadLayout, BadMetadata, BadScale, BadShape
from stallwatch_kernels.tensors import Array, contiguous

KERNEL = "ple.table"
GROUP = 16
_LARGEST = float(np.finfo(np.float32).max)


class Format(StrEnum):
    """How a table's rows are stored."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"
    NVFP4 = "nvfp4"

    @property
    def grouped(self) -> bool:
        """Whether rows carry scales of their own."""
        return self in {Format.INT8, Format.INT4, Format.NVFP4}

    @property
    def scaled(self) -> bool:
        """Whether one factor applies to a whole shard."""
        return self in {Format.FP8, Format.NVFP4}


# torch's type, then numpy's, which has neither bfloat16 nor float8.
_CODES: dict[Format, tuple[torch.dtype, type[np.generic]]] = {
    Format.FP32: (torch.float32, np.float32),
    Format.BF16: (torch.bfloat16, np.uint16),
    Format.FP8: (torch.float8_e4m3fn, np.uint8),
    Format.INT8: (torch.int8, np.int8),
    Format.INT4: (torch.uint8, np.uint8),
    Format.NVFP4: (torch.uint8, np.uint8),
}
_SCALES: dict[Format, dict[torch.dtype, type[np.generic]]] = {
    Format.INT8: {torch.float32: np.float32, torch.float16: np.float16},
    Format.INT4: {torch.float16: np.float16},
    Format.NVFP4: {torch.float8_e4m3fn: np.uint8},
}


@dataclass(frozen=True, slots=True)
class Shard:
    """Consecutive rows: codes, scales of the grouped formats, and the factor of fp8 and nvfp4.

    Tensors or numpy arrays, memory maps included. numpy has neither bfloat16 nor float8: an array
    holds those as uint16 and uint8.
    """

    codes: torch.Tensor | Array
    scales: torch.Tensor | Array | None = None
    factor: float = 1.0


class Table:
    """A checked table. It holds its shards' memory for as long as it lives, and copies none of it."""

    def __init__(
        self, fmt: Format, dim: int, shards: Sequence[Shard], *, group: int = GROUP
    ) -> None:
        self.format = fmt
        self.dim = dim
        self.group = group if fmt.grouped else dim
        self.groups = -(-dim // self.group) if fmt.grouped else 0
        self._refuse_bad_sizes(shards)
        self.codes = [self._codes(n, shard) for n, shard in enumerate(shards)]
        self.scales = (
            [self._scales(n, shard) for n, shard in enumerate(shards)] if self.groups else []
        )
        self.factors = np.array(
            [self._factor(n, s) for n, s in enumerate(shards)], dtype=np.float32
        )
        self.rows_per_shard = len(self.codes[0])
        self.rows = sum(len(codes) for codes in self.codes)
        self._refuse_bad_cuts()

    @property
    def row_bytes(self) -> int:
        """Stored bytes of one row, codes and scales."""
        codes = self.codes[0].shape[1] * self.codes[0].itemsize
        return int(codes + (self.groups * self.scales[0].itemsize if self.groups else 0))

    def _refuse_bad_sizes(self, shards: Sequence[Shard]) -> None:
        if not shards:
            raise BadMetadata(KERNEL, "shards", "are none")
        if self.dim < 1:
            raise BadMetadata(KERNEL, "dim", f"is {self.dim}; expected at least 1")
        if self.format in {Format.INT4, Format.NVFP4}:
            if self.dim % 2:
                raise BadMetadata(
                    KERNEL, "dim", f"is {self.dim}, and {self.format} packs two a byte"
                )
            if self.group != GROUP:
                raise BadMetadata(KERNEL, "group", f"is {self.group}; {self.format} has {GROUP}")
        elif self.format is Format.INT8 and self.group not in {GROUP, self.dim}:
            raise BadMetadata(KERNEL, "group", f"is {self.group}; expected {GROUP} or {self.dim}")

    def _codes(self, number: int, shard: Shard) -> Array:
        name = f"codes of shard {number}"
        of_torch, of_numpy = _CODES[self.format]
        codes = _memory(name, shard.codes, {of_torch: of_numpy})
        width = self.dim // 2 if self.format in {Format.INT4, Format.NVFP4} else self.dim
        if codes.ndim != 2 or codes.shape[1] != width:
            raise BadShape(KERNEL, name, f"are {codes.shape}; expected (rows, {width})")
        return codes

    def _scales(self, number: int, shard: Shard) -> Array:
        name = f"scales of shard {number}"
        if shard.scales is None:
            raise BadMetadata(KERNEL, name, f"are missing, and {self.format} needs them")
        scales = _memory(name, shard.scales, _SCALES[self.format])
        expected = (len(shard.codes), self.groups)
        if scales.shape != expected:
            raise BadShape(KERNEL, name, f"are {scales.shape}; expected {expected}")
        return scales

    def _factor(self, number: int, shard: Shard) -> float:
        name = f"factor of shard {number}"
        if shard.scales is not None and not self.format.grouped:
            raise BadMetadata(KERNEL, f"scales of shard {number}", f"mean nothing in {self.format}")
        if not 0 <= shard.factor <= _LARGEST:  # false for NaN, too
            raise BadScale(KERNEL, name, f"is {shard.factor}; expected a float32 of at least 0")
        if shard.factor != 1.0 and not self.format.scaled:
            raise BadMetadata(KERNEL, name, f"is {shard.factor}, and {self.format} has none")
        return shard.factor

    def _refuse_bad_cuts(self) -> None:
        """A row's shard is found by one division, so all shards but the last have the same length."""
        lengths = [len(codes) for codes in self.codes]
        if any(length != lengths[0] for length in lengths[:-1]) or lengths[-1] > lengths[0]:
            raise BadMetadata(KERNEL, "shards", f"have {lengths} rows; expected equal ones")
        if lengths[0] == 0:
            raise BadMetadata(KERNEL, "shards", "have no rows")
        if any(scales.dtype != self.scales[0].dtype for scales in self.scales):
            raise BadMetadata(KERNEL, "scales", "differ in type between shards")


def _memory(
    name: str, data: torch.Tensor | Array, kinds: dict[torch.dtype, type[np.generic]]
) -> Array:
    if isinstance(data, torch.Tensor):
        return contiguous(KERNEL, name, data, *kinds)
    if data.dtype.type not in kinds.values() or not data.dtype.isnative:
        expected = ", ".join(np.dtype(kind).name for kind in kinds.values())
        raise BadDtype(KERNEL, name, f"are {data.dtype}; expected {expected}")
    if not (data.flags.c_contiguous and data.flags.aligned):
        raise BadLayout(
            KERNEL, name, f"have strides {data.strides}; expected aligned and contiguous"
        )
    return data


def dequantise(table: Table, rows: torch.Tensor | None = None) -> torch.Tensor:
    """float32[rows, dim] in plain torch: the whole table, or the given rows. The meaning of a format."""
    wanted = torch.arange(table.rows) if rows is None else rows.reshape(-1)
    parts = torch.div(wanted, table.rows_per_shard, rounding_mode="floor").numpy()
    places = (wanted % table.rows_per_shard).numpy()
    out = torch.empty(len(wanted), table.dim)
    for number in np.unique(parts):
        mine = parts == number
        scales = table.scales[number][places[mine]] if table.groups else None
        values = _values(table, table.codes[number][places[mine]], scales)
        if table.format.scaled:
            values *= torch.from_numpy(table.factors)[number]
        out[torch.from_numpy(mine)] = values
    return out


def _values(table: Table, codes: Array, scales: Array | None) -> torch.Tensor:
    stored = torch.from_numpy(codes)
    of_torch, _ = _CODES[table.format]
    if table.format is Format.INT4:
        values = _nibbles(stored).float() - 8
    elif table.format is Format.NVFP4:
        values = _E2M1[_nibbles(stored).long()]
    else:
        values = (stored.view(of_torch) if stored.dtype != of_torch else stored).float()
    if scales is None:
        return values
    factors = torch.from_numpy(scales)
    if table.format is Format.NVFP4:
        factors = factors.view(torch.float8_e4m3fn)
    wide = factors.float().repeat_interleave(table.group, dim=1)
    return values * wide[:, : table.dim]


_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)
