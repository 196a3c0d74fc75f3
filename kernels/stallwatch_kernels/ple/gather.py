"""Rows of a table, by id, in the model's dtype: dequantised to float32 and cast once.

The same bits come out of RAM, a memory map, one shard or many, and equal `table.dequantise` of the whole
table, indexed. Ids and scales are checked before a row is read or the output is written.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stallwatch_kernels import gpu, warmup
from stallwatch_kernels.admission import Candidate, choose
from stallwatch_kernels.errors import BadDtype, BadIndex, BadMetadata, BadScale, BadShape
from stallwatch_kernels.jit import inlined, kernel
from stallwatch_kernels.ple import decode
from stallwatch_kernels.ple.decode import E4M3, F16, F32
from stallwatch_kernels.ple.memory import copy, f32_at, i64_at, prefetch
from stallwatch_kernels.ple.table import Format, Shard, Table, dequantise
from stallwatch_kernels.pool import SERIAL, RowPool
from stallwatch_kernels.tensors import Array, apart, contiguous

KERNEL = "ple.gather"
DTYPES = {torch.float32: F32, torch.bfloat16: decode.BF16, torch.float16: F16}

# The fields of a block of int64, all that the kernel is told: each argument of a call costs time, an address the least.
_ROWS, _SHARD_ROWS, _DIM, _GROUP, _GROUPS, _CODE_BYTES, _SCALE_BYTES, _SCALE_KIND = range(8)
_OUT_KIND, _FORMAT, _SHARDS = 8, 9, 10
_CODES, _SCALES, _FACTORS, _IDS, _OUT, _FIELDS = 11, 12, 13, 14, 15, 16  # addresses

_RAW, _FP32, _BF16, _FP8, _INT8, _INT4, _NVFP4 = range(7)
_FORMATS = {
    Format.FP32: _FP32,
    Format.BF16: _BF16,
    Format.FP8: _FP8,
    Format.INT8: _INT8,
    Format.INT4: _INT4,
    Format.NVFP4: _NVFP4,
}
_SCALE_KINDS = {"float32": F32, "float16": F16, "uint8": E4M3}
_LINE = 64
_AHEAD = 16  # rows whose cache lines are asked for before they are needed
_CHECK_AHEAD = 32  # rows of the check, which is over sooner than a line arrives
_FEW = 64
_LEAST_ROWS = 1024  # fewer are gathered sooner than a thread wakes up


@dataclass(frozen=True, slots=True)
class GatherSpec:
    """A gather from a table of one format, read-only where it is mapped, into one dtype."""

    format: Format
    dtype: torch.dtype


def candidates(spec: GatherSpec) -> list[Candidate]:
    """The compiled kernel first, torch after it. A table lies in RAM or in files, where no GPU reads it:
    `gpu.gather` takes a table on a device.
    """
    return [
        ("numba", None if spec.dtype in DTYPES else "writes float32 and halves"),
        ("triton", gpu.refusal() or "the table lies in RAM or in files"),
        ("torch", None),
    ]


class Gather:
    """Gathers from one table into one dtype."""

    def __init__(self, table: Table, dtype: torch.dtype, pool: RowPool = SERIAL) -> None:
        if dtype not in DTYPES:
            raise BadDtype(KERNEL, "dtype", f"is {dtype}; expected float32, bfloat16 or float16")
        self.table = table
        self.dtype = dtype
        self._pool = pool
        self.choice = choose(KERNEL, candidates(GatherSpec(table.format, dtype)))
        # both are held: the block knows their addresses alone
        self._codes = np.array([codes.ctypes.data for codes in table.codes], dtype=np.int64)
        self._scales = np.array(
            [s.ctypes.data for s in table.scales or table.codes], dtype=np.int64
        )
        self._block = _block(table, dtype)
        self._block[_CODES : _FACTORS + 1] = (
            self._codes.ctypes.data,
            self._scales.ctypes.data,
            table.factors.ctypes.data,
        )

    def __call__(self, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[T, H * dim] of rows int64[T, H]."""
        if out is None:
            if rows.ndim != 2:
                raise BadShape(KERNEL, "rows", f"is {tuple(rows.shape)}; expected (tokens, heads)")
            tokens, heads = rows.shape
            out = torch.empty(tokens, heads * self.table.dim, dtype=self.dtype)
        self.bind(rows, out)(len(rows))
        return out

    def bind(self, rows: torch.Tensor, out: torch.Tensor) -> Bound:
        """Prepare for gathering again and again between the same two buffers, [T, H] and [T, H * dim]."""
        ids = contiguous(KERNEL, "rows", rows, torch.int64)
        if ids.ndim != 2:
            raise BadShape(KERNEL, "rows", f"is {ids.shape}; expected (tokens, heads)")
        target = contiguous(KERNEL, "out", out, self.dtype)
        apart(KERNEL, ("out", "rows"), out, rows)
        expected = (ids.shape[0], ids.shape[1] * self.table.dim)
        if target.shape != expected:
            raise BadShape(KERNEL, "out", f"is {target.shape}; expected {expected}")
        block = self._block.copy()
        block[_IDS], block[_OUT] = ids.ctypes.data, target.ctypes.data
        return Bound(self, ids, out, block)

    def _run(self, rows: Array, count: int, block: int) -> None:
        if self._pool.threads == 1 or count < 2 * _LEAST_ROWS:
            bad = _checked(block, count)
        else:
            bad = _check(block, count)
            if bad == -1:
                self._pool.run(lambda lo, hi: _gather(block, lo, hi), count, least=_LEAST_ROWS)
        if bad != -1:
            self._refuse(rows, bad)

    def _refuse(self, rows: Array, bad: int) -> None:
        if bad >= 0:
            problem = f"is {rows[bad]}, and the table has {self.table.rows} rows"
            raise BadIndex(KERNEL, f"rows[{bad}]", problem)
        raise BadScale(KERNEL, f"scales of row {rows[-bad - 2]}", "are NaN, infinite or negative")


class Bound:
    """A gather between two fixed buffers: nothing is left to do per call but to run."""

    __slots__ = ("_at", "_block", "_gather", "_heads", "_out", "_plain", "_rows", "tokens")

    def __init__(self, gather: Gather, rows: Array, out: torch.Tensor, block: Array) -> None:
        self.tokens, self._heads = rows.shape
        self._gather = gather
        self._rows = rows.reshape(-1)
        self._out = out  # held, as rows and block are: the kernel knows addresses alone
        self._block = block
        self._at = block.ctypes.data
        self._plain = gather.choice.impl == "torch"

    def __call__(self, tokens: int) -> None:
        """Gather the first `tokens`. Raises BadIndex or BadScale with the output untouched."""
        if not 0 <= tokens <= self.tokens:
            raise BadMetadata(KERNEL, "tokens", f"is {tokens}; the buffers hold {self.tokens}")
        count = tokens * self._heads
        if self._plain:
            self._torch(tokens, count)
        else:
            self._gather._run(self._rows, count, self._at)

    def _torch(self, tokens: int, count: int) -> None:
        bad = _check(self._at, count)
        if bad != -1:
            self._gather._refuse(self._rows, bad)
        rows = torch.from_numpy(self._rows[:count]).view(tokens, self._heads)
        self._out[:tokens] = reference(self._gather.table, rows, self._out.dtype)


def reference(table: Table, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same in plain torch, [T, H * dim]."""
    tokens, heads = rows.shape
    return dequantise(table, rows).to(dtype).reshape(tokens, heads * table.dim)


def _block(table: Table, dtype: torch.dtype) -> Array:
    block = np.zeros(_FIELDS, dtype=np.int64)
    block[_ROWS] = table.rows
    block[_SHARD_ROWS] = table.rows_per_shard
    block[_SHARDS] = len(table.codes)
    block[_DIM] = table.dim
    block[_GROUP] = table.group
    block[_GROUPS] = table.groups
    block[_CODE_BYTES] = table.codes[0].strides[0]
    if table.groups:
        block[_SCALE_BYTES] = table.scales[0].itemsize * table.groups
        block[_SCALE_KIND] = _SCALE_KINDS[table.scales[0].dtype.name]
    block[_OUT_KIND] = DTYPES[dtype]
    raw = {Format.FP32: torch.float32, Format.BF16: torch.bfloat16}.get(table.format) == dtype
    block[_FORMAT] = _RAW if raw else _FORMATS[table.format]
    return block


@kernel
def _check(at: int, count: int) -> int:
    """-1, or the place of an id outside of the table, or -2 - the place of a row with a bad scale."""
    block = i64_at(at, _FIELDS)
    rows, scales = i64_at(block[_IDS], count), i64_at(block[_SCALES], block[_SHARDS])
    codes, code_size = i64_at(block[_CODES], block[_SHARDS]), block[_CODE_BYTES]
    limit, shard_rows = block[_ROWS], block[_SHARD_ROWS]
    groups, size, kind = block[_GROUPS], block[_SCALE_BYTES], block[_SCALE_KIND]
    for i in range(count):
        if rows[i] < 0 or rows[i] >= limit:
            return i
        if count <= _FEW:  # so few that all of them can be on their way at once
            if groups:
                ahead = _address(rows[i], shard_rows, scales, size)
                prefetch(ahead)
                prefetch(ahead + size - 1)
            first = _address(rows[i], shard_rows, codes, code_size)
            for line in range(0, code_size, _LINE):
                prefetch(first + line)
    for i in range(count if groups else 0):
        if count > _FEW and i + _CHECK_AHEAD < count:
            ahead = _address(rows[i + _CHECK_AHEAD], shard_rows, scales, size)
            prefetch(ahead)
            prefetch(ahead + size - 1)
        address = _address(rows[i], shard_rows, scales, size)
        for group in range(groups):
            if decode.scale_is_bad(address, kind, group):
                return -2 - i
    return -1


@inlined
def _address(row: Any, shard_rows: Any, shards: Array, size: Any) -> Any:
    """Where a row begins; a table in one shard is spared the division."""
    if row < shard_rows:
        return shards[0] + row * size
    shard = row // shard_rows
    return shards[shard] + (row - shard * shard_rows) * size


@kernel
def _gather(at: int, lo: int, hi: int) -> None:
    """One kernel for all formats: a branch per row costs nothing, and there is one thing to warm up."""
    block = i64_at(at, _FIELDS)
    # in locals, or the compiler would read them again after every store
    dim, fmt, kind, out = block[_DIM], block[_FORMAT], block[_OUT_KIND], block[_OUT]
    shard_rows, size, group = block[_SHARD_ROWS], block[_CODE_BYTES], block[_GROUP]
    scale_size, scale_kind = block[_SCALE_BYTES], block[_SCALE_KIND]
    rows, shards = i64_at(block[_IDS], hi), i64_at(block[_CODES], block[_SHARDS])
    scale_shards = i64_at(block[_SCALES], block[_SHARDS])
    factors = f32_at(block[_FACTORS], block[_SHARDS])
    out_size = dim * (4 if kind == F32 else 2)
    values = np.empty(dim, dtype=np.float32)
    scratch = np.int64(values.ctypes.data)
    for i in range(lo, hi):
        if i + _AHEAD < hi:
            ahead = _address(rows[i + _AHEAD], shard_rows, shards, size)
            for line in range(0, size, _LINE):
                prefetch(ahead + line)
        codes = _address(rows[i], shard_rows, shards, size)
        final = out + i * out_size
        if fmt == _RAW:
            copy(final, codes, size)
            continue
        target = final if kind == F32 else scratch
        scales = _address(rows[i], shard_rows, scale_shards, scale_size)
        if fmt == _FP8:
            decode.decode_fp8(codes, target, dim, factors[rows[i] // shard_rows])
        elif fmt == _BF16:
            decode.decode_bf16(codes, target, dim)
        elif fmt == _FP32:
            copy(target, codes, size)
        elif fmt == _NVFP4:
            decode.decode_nvfp4(codes, scales, target, dim, factors[rows[i] // shard_rows])
        elif fmt == _INT4:
            decode.decode_int4(codes, scales, target, dim)
        else:
            decode.decode_int8(codes, scales, scale_kind, target, dim, group)
        if kind != F32:
            decode.cast_row(target, final, dim, kind)


@kernel
def _checked(at: int, count: int) -> int:
    """Check and gather in one call."""
    bad = _check(at, count)
    if bad == -1:
        _gather(at, 0, count)
    return bad


@warmup.of(GatherSpec)
def tasks(spec: GatherSpec, shapes: warmup.Shapes) -> Iterable[warmup.Task]:  # noqa: ARG001
    """Gather one row of zeros: the kernel has the same signature for every table."""

    def run() -> None:
        codes = torch.zeros(1, 16, dtype=torch.float32)
        table = Table(Format.FP32, 16, [Shard(codes)])
        Gather(table, spec.dtype)(torch.zeros(1, 1, dtype=torch.int64))
        nothing = np.zeros(_FIELDS, dtype=np.int64)  # the two kernels that a pool calls
        _check(nothing.ctypes.data, 0)
        _gather(nothing.ctypes.data, 0, 0)

    yield warmup.Task(KERNEL, run)
