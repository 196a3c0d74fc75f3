"""Sixteen floats at a time, written down as LLVM vectors: the inner loops of page4.

LLVM left to itself uses half of the machine here (it prefers 256-bit vectors on these CPUs, and a loop
with 24 running sums spills). So the tiles are emitted with their registers laid out by hand: 4 tokens x
6 heads for scores, 64 columns x 6 heads for values. The order of every sum is therefore written in this
file, and a result cannot depend on how a loop was cut. On a CPU with narrower vectors LLVM splits them.

Addresses are bytes, strides are elements. An element's kind comes from the type of the `cache` array:
float32; int16 holds float16 bits; uint16 holds bfloat16 bits; uint8 holds E4M3 codes, which are read
as value / 256 (`code_unit`: an exact power of two that the caller folds into its scale).
"""

# ruff: noqa: ARG001, PLR0917  (an intrinsic declares its arguments by position; code generation reads them)

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

WIDTH = 16
TOKENS = 4
E4M3_UNIT = 256.0

_F32 = ir.FloatType()
_I64 = ir.IntType(64)
_VEC = ir.VectorType(_F32, WIDTH)
_FAST = ("contract",)  # a*b+c in one rounding where the CPU can; nothing else is reordered

_ROUND = 1.5 * 2.0**23
_TAYLOR = [math.log(2.0) ** k / math.factorial(k) for k in range(8)]

Address = types.int64
_PAIR = types.UniTuple(types.int64, 2)
Codegen = Callable[[Any, Any, Any, Any], Any]


def _pointer(builder: Any, address: Any, pointee: Any) -> Any:
    return builder.inttoptr(address, ir.PointerType(pointee))


def _load(builder: Any, address: Any, vector: Any) -> Any:
    loaded = builder.load(_pointer(builder, address, vector))
    loaded.align = 1
    return loaded


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, _pointer(builder, address, value.type)).align = 1


def _ints(bits: int) -> Any:
    return ir.VectorType(ir.IntType(bits), WIDTH)


def _const(bits: int, value: int) -> Any:
    return ir.Constant(_ints(bits), [value] * WIDTH)


def _floats(value: float) -> Any:
    return ir.Constant(_VEC, [value] * WIDTH)


def _halves(builder: Any, half: Any, vectors: int) -> list[Any]:
    """Float16 bits of `vectors` x 16 elements as float32 vectors."""
    wide = builder.bitcast(half, ir.VectorType(ir.HalfType(), WIDTH * vectors))
    parts = [
        builder.shuffle_vector(wide, wide, _mask(*range(WIDTH * v, WIDTH * (v + 1))))
        for v in range(vectors)
    ]
    return [builder.fpext(part, _VEC) for part in parts]


def _e4m3(builder: Any, address: Any, vectors: int) -> list[Any]:
    """Codes as float16 bits of value / 256: subnormals stay exact, and the NaN codes become NaN.

    A code seen as a signed byte, widened and shifted by 7, has its sign in bit 15, its exponent and
    mantissa where float16 has them, and a second copy of the sign in bit 14, which is cleared.
    """
    lanes = WIDTH * vectors
    codes = _load(builder, address, ir.VectorType(ir.IntType(8), lanes))
    words = ir.VectorType(ir.IntType(16), lanes)

    def every(value: int) -> Any:
        return ir.Constant(words, [value] * lanes)

    half = builder.and_(builder.shl(builder.sext(codes, words), every(7)), every(0xBFFF))
    nan = builder.icmp_unsigned("==", builder.and_(half, every(0x3F80)), every(0x3F80))
    return _halves(builder, builder.select(nan, every(0x7E00), half), vectors)


def _read(builder: Any, dtype: Any, address: Any, vectors: int) -> list[Any]:
    """`vectors` x 16 elements of a cache as float32."""
    if dtype == types.uint8:
        return [
            v
            for at in range(0, vectors, 2)
            for v in _e4m3(
                builder, builder.add(address, ir.Constant(_I64, at * WIDTH)), min(2, vectors - at)
            )
        ]
    places = [
        builder.add(address, ir.Constant(_I64, v * WIDTH * _size(dtype))) for v in range(vectors)
    ]
    if dtype == types.float32:
        return [_load(builder, place, _VEC) for place in places]
    if dtype == types.int16:
        return [_halves(builder, _load(builder, place, _ints(16)), 1)[0] for place in places]
    wide = [builder.zext(_load(builder, place, _ints(16)), _ints(32)) for place in places]
    return [builder.bitcast(builder.shl(w, _const(32, 16)), _VEC) for w in wide]


def _size(dtype: Any) -> int:
    return int(dtype.bitwidth) // 8


def _splat(builder: Any, scalar: Any) -> Any:
    one = builder.insert_element(
        ir.Constant(_VEC, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0)
    )
    return builder.shuffle_vector(
        one, ir.Constant(_VEC, ir.Undefined), ir.Constant(_ints(32), [0] * WIDTH)
    )


def _fma(builder: Any, a: Any, b: Any, total: Any) -> Any:
    return builder.fadd(builder.fmul(a, b, flags=_FAST), total, flags=_FAST)


def _scaled(builder: Any, index: Any, size: int) -> Any:
    return builder.mul(index, ir.Constant(_I64, size))


def _loop(
    builder: Any, count: Any, starts: list[Any], body: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """`for i in range(count)` with values carried in registers. Returns them."""
    entry = builder.block
    head, inside, after = (builder.append_basic_block(n) for n in ("head", "inside", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(_I64)
    index.add_incoming(ir.Constant(_I64, 0), entry)
    carried = [builder.phi(start.type) for start in starts]
    for phi, start in zip(carried, starts, strict=True):
        phi.add_incoming(start, entry)
    builder.cbranch(builder.icmp_signed("<", index, count), inside, after)
    builder.position_at_end(inside)
    following = body(index, carried)
    index.add_incoming(builder.add(index, ir.Constant(_I64, 1)), builder.block)
    for phi, value in zip(carried, following, strict=True):
        phi.add_incoming(value, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return carried


def _fold(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """One number out of sixteen, halves first."""
    width = WIDTH
    while width > 1:
        width //= 2
        low = builder.shuffle_vector(vector, vector, _mask(*range(width)))
        vector = combine(
            low, builder.shuffle_vector(vector, vector, _mask(*range(width, 2 * width)))
        )
    return builder.extract_element(vector, ir.Constant(ir.IntType(32), 0))


def _exp2(builder: Any, x: Any) -> Any:
    """2 ** x for x <= 0: x = n + f with |f| <= 1/2, 2 ** f by its Taylor series to degree 7 (relative
    error under 6e-9 before rounding), n into the exponent. Under 2 ** -126 it is 0; NaN stays NaN.
    """
    small = builder.fcmp_ordered("<", x, _floats(-127.0))
    x = builder.select(small, _floats(-127.0), x)
    shifted = builder.fadd(x, _floats(_ROUND))  # the sum's last bits hold the nearest integer
    f = builder.fsub(x, builder.fsub(shifted, _floats(_ROUND)))
    series = _floats(_TAYLOR[-1])
    for term in reversed(_TAYLOR[:-1]):
        series = _fma(builder, series, f, _floats(term))
    exponent = builder.add(builder.bitcast(shifted, _ints(32)), _const(32, 127))
    return builder.fmul(series, builder.bitcast(builder.shl(exponent, _const(32, 23)), _VEC))


def _mask(*pattern: int) -> Any:
    return ir.Constant(ir.VectorType(ir.IntType(32), len(pattern)), list(pattern))


_EVEN = [lane + which for lane in range(0, WIDTH, 2) for which in (0, WIDTH)]
_ODD = [lane + 1 for lane in _EVEN]
_LOW = [lane + which + i for lane in range(0, WIDTH, 4) for which in (0, WIDTH) for i in (0, 1)]
_HIGH = [lane + 2 for lane in _LOW]


def _sums(builder: Any, four: list[Any]) -> Any:
    """The sums of four vectors as one vector of four: a tree, the same for each."""

    def pair(a: Any, b: Any, first: list[int], second: list[int]) -> Any:
        left = builder.shuffle_vector(a, b, _mask(*first))
        return builder.fadd(left, builder.shuffle_vector(a, b, _mask(*second)))

    def fold(vector: Any, width: int) -> Any:
        low = builder.shuffle_vector(vector, vector, _mask(*range(width)))
        return builder.fadd(
            low, builder.shuffle_vector(vector, vector, _mask(*range(width, 2 * width)))
        )

    halves = [pair(four[0], four[1], _EVEN, _ODD), pair(four[2], four[3], _EVEN, _ODD)]
    return fold(fold(pair(halves[0], halves[1], _LOW, _HIGH), 8), 4)


def _pair(builder: Any, value: Any) -> tuple[Any, Any]:
    first, second = cgutils.unpack_tuple(builder, value, 2)
    return first, second


def _rows(builder: Any, at: Any, step: Any, count: int) -> list[Any]:
    """Byte addresses of `count` float32 rows."""
    bytes_ = _scaled(builder, step, 4)
    return [builder.add(at, builder.mul(bytes_, ir.Constant(_I64, h))) for h in range(count)]


def _after(builder: Any, address: Any, bytes_: int) -> Any:
    return builder.add(address, ir.Constant(_I64, bytes_))


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def score_tile(
    _typing: Any, cache: Any, heads: Any, q: Any, tokens: Any, steps: Any, out: Any
) -> tuple[Any, Codegen]:
    """out[h, 0..3] = q[h] . k[token] for the four tokens whose byte addresses lie at `tokens`.

    `q` and `out` are (address, stride) of float32 rows; the head size is 16 * `steps`.
    """
    count, dtype = cast("int", heads.literal_value), cache.dtype

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        token_at = args[3]
        keys = [
            builder.load(_pointer(builder, _after(builder, token_at, 8 * t), _I64))
            for t in range(TOKENS)
        ]
        queries = _rows(builder, *_pair(builder, args[2]), count)

        def body(index: Any, sums: list[Any]) -> list[Any]:
            at = _scaled(builder, index, WIDTH * 4)
            k_at = _scaled(builder, index, WIDTH * _size(dtype))
            read = [_read(builder, dtype, builder.add(key, k_at), 1)[0] for key in keys]
            following = []
            for h, row in enumerate(queries):
                query = _load(builder, builder.add(row, at), _VEC)
                mine = sums[h * TOKENS : (h + 1) * TOKENS]
                following += [
                    _fma(builder, query, key, total) for key, total in zip(read, mine, strict=True)
                ]
            return following

        sums = _loop(builder, args[4], [_floats(0.0)] * (count * TOKENS), body)
        for h, place in enumerate(_rows(builder, *_pair(builder, args[5]), count)):
            _store(builder, _sums(builder, sums[h * TOKENS : (h + 1) * TOKENS]), place)
        return context.get_dummy_value()

    return types.void(cache, heads, _PAIR, Address, Address, _PAIR), codegen


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def value_tile(
    _typing: Any, cache: Any, shape: Any, weights: Any, tokens: Any, count: Any, out: Any
) -> tuple[Any, Codegen]:
    """out[h, 0..16*w) += sum over tokens of weights[h, token] * v[token], in the order of the tokens.

    `shape` is heads * 8 + w; `tokens` is (address of byte addresses, bytes to add to each); `weights` and
    `out` are (address, stride) of float32 rows.
    """
    (heads, wide), dtype = divmod(cast("int", shape.literal_value), 8), cache.dtype

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        token_at, column = _pair(builder, args[3])
        p_rows = _rows(builder, *_pair(builder, args[2]), heads)
        places = [
            _after(builder, row, 4 * WIDTH * w)
            for row in _rows(builder, *_pair(builder, args[5]), heads)
            for w in range(wide)
        ]

        def body(index: Any, sums: list[Any]) -> list[Any]:
            at = _scaled(builder, index, 4)
            token = builder.load(
                _pointer(builder, builder.add(token_at, _scaled(builder, index, 8)), _I64)
            )
            values = _read(builder, dtype, builder.add(token, column), wide)
            following = []
            for h, p_row in enumerate(p_rows):
                weight = _splat(
                    builder, builder.load(_pointer(builder, builder.add(p_row, at), _F32))
                )
                mine = sums[h * wide : (h + 1) * wide]
                following += [
                    _fma(builder, weight, v, total) for v, total in zip(values, mine, strict=True)
                ]
            return following

        sums = _loop(builder, args[4], [_floats(0.0)] * len(places), body)
        for place, total in zip(places, sums, strict=True):
            # Apart from what was there before: short sums keep the rounding error of long rows small.
            _store(builder, builder.fadd(_load(builder, place, _VEC), total), place)
        return context.get_dummy_value()

    return types.void(cache, shape, _PAIR, _PAIR, Address, _PAIR), codegen


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def widen(_typing: Any, cache: Any, source: Any, steps: Any, target: Any) -> tuple[Any, Codegen]:
    """16 * `steps` elements of a cache at byte address `source` as float32 at `target`."""
    dtype = cache.dtype

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        def body(index: Any, _none: list[Any]) -> list[Any]:
            at = builder.add(args[1], _scaled(builder, index, WIDTH * _size(dtype)))
            to = builder.add(args[3], _scaled(builder, index, WIDTH * 4))
            _store(builder, _read(builder, dtype, at, 1)[0], to)
            return []

        _loop(builder, args[2], [], body)
        return context.get_dummy_value()

    return types.void(cache, Address, Address, Address), codegen


@intrinsic  # type: ignore[untyped-decorator]
def peak(_typing: Any, scores: Any, steps: Any) -> tuple[Any, Codegen]:
    """The largest of 16 * `steps` floats at a byte address; NaN is passed over."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        def larger(a: Any, b: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", a, b), a, b)

        def body(index: Any, best: list[Any]) -> list[Any]:
            at = builder.add(args[0], _scaled(builder, index, WIDTH * 4))
            return [larger(_load(builder, at, _VEC), best[0])]

        best = _loop(builder, args[1], [_floats(float("-inf"))], body)[0]
        return _fold(builder, best, larger)

    return types.float32(Address, Address), codegen


@intrinsic  # type: ignore[untyped-decorator]
def exponentials(
    _typing: Any, scores: Any, steps: Any, scale: Any, top: Any
) -> tuple[Any, Codegen]:
    """Replace 16 * `steps` floats s at a byte address by 2 ** ((s - top) * scale), and return their sum.

    Subtracted first: the largest s then has exactly 1, however large it is.
    """

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        at, steps_, scale_, top_ = args
        factor, highest = _splat(builder, scale_), _splat(builder, top_)

        def body(index: Any, total: list[Any]) -> list[Any]:
            place = builder.add(at, _scaled(builder, index, WIDTH * 4))
            x = builder.fmul(builder.fsub(_load(builder, place, _VEC), highest), factor)
            value = _exp2(builder, x)
            _store(builder, value, place)
            return [builder.fadd(total[0], value)]

        total = _loop(builder, steps_, [_floats(0.0)], body)[0]
        return _fold(builder, total, builder.fadd)

    return types.float32(Address, Address, types.float32, types.float32), codegen


@intrinsic  # type: ignore[untyped-decorator]
def fetch(_typing: Any, places: Any, count: Any, lines: Any) -> tuple[Any, Codegen]:
    """Ask for `lines` cache lines at each of `count` byte addresses that lie at `places`; wait for none."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        i32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [ir.PointerType(ir.IntType(8)), i32, i32, i32])
        ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")

        def place(index: Any, _none: list[Any]) -> list[Any]:
            at = builder.load(
                _pointer(builder, builder.add(args[0], _scaled(builder, index, 8)), _I64)
            )

            def line(number: Any, _nothing: list[Any]) -> list[Any]:
                target = builder.add(at, _scaled(builder, number, 64))
                pointer = _pointer(builder, target, ir.IntType(8))
                builder.call(ask, [pointer, i32(0), i32(2), i32(1)])  # to read, second level, data
                return []

            return _loop(builder, args[2], [], line)

        _loop(builder, args[1], [], place)
        return context.get_dummy_value()

    return types.void(Address, Address, Address), codegen
