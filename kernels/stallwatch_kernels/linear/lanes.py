"""Tiles of dot products with the order of every addition written down, as LLVM vector code.

A dot product over K is one accumulator of 16 lanes: lane l sums k = l, l + 16, l + 32, ... by fused
multiply-add, a remainder of K joins as one last masked step, then the lanes are folded 16 -> 8 -> 4 -> 2
-> 1. A tile holds rows x columns such accumulators, which only decides what shares a load: the bits of
each product do not depend on the tile, so neither on the batch. Left to LLVM's vectoriser the order would
follow from its cost model, tile by tile.

The weight is float32, bfloat16, or NVFP4, whose 16-wide scale group is exactly one vector. NVFP4 products
come out for twice the code (an integer) times the block scale: the caller multiplies by half the global.
Addresses and strides are bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from stallwatch_kernels.linear.vectors import (
    BF16,
    FLOAT,
    I8,
    I16,
    I32,
    I64,
    LANES,
    NVFP4,
    VECTOR,
    Emitter,
    constants,
    raw,
    splat,
)

_UNROLL = 4  # scale groups decoded at once: the nibbles of 64 weights fill one 512-bit register


class _Tile:
    """Emits one tile. `step(i)` adds lanes k = i .. i + 15 of every product."""

    def __init__(
        self, builder: Any, arguments: list[Any], shape: tuple[int, int, int], *, ahead: bool
    ) -> None:
        self.emit = Emitter(builder)
        self.builder = builder
        self.rows, self.columns, self.format = shape
        self.ahead = ahead
        (self.x, self.x_stride, self.w, self.w_stride, self.s, self.s_stride) = arguments[:6]
        (self.table, self.k, self.y, self.y_stride) = arguments[6:]
        zero = ir.Constant(VECTOR, [0.0] * LANES)
        self.sums = [
            [cgutils.alloca_once_value(builder, zero) for _ in range(self.columns)]
            for _ in range(self.rows)
        ]

    def at(self, base: Any, stride: Any, index: int, offset: Any) -> Any:
        b = self.builder
        return b.add(b.add(base, b.mul(stride, ir.Constant(I64, index))), offset)

    def build(self) -> None:
        b = self.builder
        start = ir.Constant(I64, 0)
        if self.format == NVFP4:
            wide = LANES * _UNROLL
            bulk = b.and_(self.k, ir.Constant(I64, -wide))
            for i in self._loop(start, bulk, wide):
                self._nvfp4(i, _UNROLL)
            for i in self._loop(bulk, self.k, LANES):
                self._nvfp4(i, 1)
        else:
            bulk = b.and_(self.k, ir.Constant(I64, -LANES))
            for i in self._loop(start, bulk, LANES):
                self._plain(i, None)
            with b.if_then(b.icmp_signed("<", bulk, self.k), likely=False):
                self._plain(bulk, self._rest(bulk))
        self._store()

    def _loop(self, start: Any, stop: Any, step: int) -> Iterator[Any]:
        with cgutils.for_range_slice(
            self.builder, start, stop, ir.Constant(I64, step), intp=I64
        ) as (index, _):
            yield index

    def _rest(self, bulk: Any) -> Any:
        left = self.builder.trunc(self.builder.sub(self.k, bulk), I32)
        one = self.builder.insert_element(
            ir.Constant(ir.VectorType(I32, LANES), None), left, ir.Constant(I32, 0)
        )
        count = self.builder.shuffle_vector(one, one, splat(I32, 0, LANES))
        return self.builder.icmp_signed("<", constants(I32, list(range(LANES))), count)

    def _plain(self, i: Any, mask: Any) -> None:
        b, size = self.builder, 2 if self.format == BF16 else 4
        element = I16 if self.format == BF16 else FLOAT
        kind = ir.VectorType(element, LANES)
        offset = b.mul(i, ir.Constant(I64, size))
        weights = []
        for column in range(self.columns):
            address = self.at(self.w, self.w_stride, column, offset)
            loaded = self._read(address, kind, mask)
            if self.ahead and mask is None:
                self._prefetch(address)
            weights.append(self.emit.widen_bf16(loaded) if self.format == BF16 else loaded)
        self._add(i, weights, mask)

    def _read(self, address: Any, kind: ir.Type, mask: Any) -> Any:
        if mask is None:
            return self.emit.load(address, kind)
        return self.emit.masked(address, kind, mask)

    def _prefetch(self, address: Any) -> None:
        # Its place in the next strip: the hardware does not follow rows across their ends.
        self.emit.prefetch(self.at(address, self.w_stride, self.columns, ir.Constant(I64, 0)))

    def _nvfp4(self, i: Any, groups: int) -> None:
        b = self.builder
        half = b.lshr(i, ir.Constant(I64, 1))
        group = b.lshr(i, ir.Constant(I64, 4))
        codes = []
        for column in range(self.columns):
            address = self.at(self.w, self.w_stride, column, half)
            codes.append(self.emit.nibbles(address, groups))
            if self.ahead and groups > 1:
                self._prefetch(address)
        for g in range(groups):
            weights = []
            for column in range(self.columns):
                where = self.at(self.s, self.s_stride, column, b.add(group, ir.Constant(I64, g)))
                scale = self.emit.splat(self._scale(where))
                part = self.emit.part(codes[column], g * LANES, LANES)
                weights.append(b.fmul(self.emit.doubled(part), scale))
            self._add(b.add(i, ir.Constant(I64, g * LANES)), weights, None)

    def _scale(self, where: Any) -> Any:
        b = self.builder
        code = b.zext(self.emit.load(where, I8), I64)
        return self.emit.load(b.add(self.table, b.mul(code, ir.Constant(I64, 4))), FLOAT, 4)

    def _add(self, i: Any, weights: list[Any], mask: Any) -> None:
        b = self.builder
        offset = b.mul(i, ir.Constant(I64, 4))
        for row in range(self.rows):
            x = self._read(self.at(self.x, self.x_stride, row, offset), VECTOR, mask)
            for column, weight in enumerate(weights):
                total = self.sums[row][column]
                b.store(self.emit.fma(weight, x, b.load(total)), total)

    def _store(self) -> None:
        b = self.builder
        sums = [b.load(total) for row in self.sums for total in row]
        if not sums:
            return
        values = self.emit.fold(sums)
        kind = ir.VectorType(FLOAT, self.columns)
        for row in range(self.rows):
            where = self.at(self.y, self.y_stride, row, ir.Constant(I64, 0))
            part = self.emit.part(values, row * self.columns, self.columns)
            b.store(part, b.inttoptr(where, kind.as_pointer()), align=4)


class _Expansion(_Tile):
    """Writes the weights themselves as float32 to y instead of multiplying them."""

    def _add(self, i: Any, weights: list[Any], mask: Any) -> None:
        b = self.builder
        offset = b.mul(i, ir.Constant(I64, 4))
        for column, weight in enumerate(weights):
            where = self.at(self.y, self.y_stride, column, offset)
            b.store(weight, b.inttoptr(where, VECTOR.as_pointer()), align=4)


def strip(columns: int, weight: int, rows: int, *, ahead: bool = False) -> Callable[..., None]:
    """`columns` weight rows against m rows of x, `rows` at a time; callable from compiled code.

    Arguments, all int64: x, x_stride, w, w_stride, scales, scales_stride, table, k, y, y_stride, m. x is
    float32 [m, k]; y float32 [m, columns] (its column stride is 4 bytes); scales and table (256 floats,
    E4M3) are read for NVFP4 alone, whose k is a multiple of 16.
    """

    def emit(builder: Any, arguments: list[Any]) -> None:
        x, xs, w, ws, s, ss, t, k, y, ys, m = arguments

        def rows_from(row: Any, count: int) -> None:
            at_x = builder.add(x, builder.mul(row, xs))
            at_y = builder.add(y, builder.mul(row, ys))
            operands = [at_x, xs, w, ws, s, ss, t, k, at_y, ys]
            _Tile(builder, operands, (count, columns, weight), ahead=ahead).build()

        whole = builder.and_(m, ir.Constant(I64, -rows))
        step = ir.Constant(I64, rows)
        with cgutils.for_range_slice(builder, ir.Constant(I64, 0), whole, step, intp=I64) as (
            row,
            _,
        ):
            rows_from(row, rows)
        rest = builder.sub(m, whole)
        for count in range(1, rows):
            with builder.if_then(builder.icmp_signed("==", rest, ir.Constant(I64, count))):
                rows_from(whole, count)

    return raw(emit, 11)


def expansion(columns: int, weight: int) -> Callable[..., None]:
    """`columns` weight rows as float32.

    Arguments, all int64: w, w_stride, scales, scales_stride, table, k, y, y_stride; a row of y has room for
    k rounded up to 16.
    """

    def emit(builder: Any, arguments: list[Any]) -> None:
        zero = ir.Constant(I64, 0)
        _Expansion(builder, [zero, zero, *arguments], (0, columns, weight), ahead=True).build()

    return raw(emit, 8)
