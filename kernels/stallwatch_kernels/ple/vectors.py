# ruff: noqa: ARG001 - an intrinsic declares its arguments to numba, and reads them as `args`
"""Sixteen codes of a group to sixteen float32, in vectors spelled out.

The compiler leaves loops of 16 with two pointers alone: it cannot see that they do not overlap, and thinks the
check for that dearer than the loop. Measured, the loops were three to four times slower than this.
Vector types are LLVM's own, so any processor can run them. E4M3 and E2M1 are float16 with fewer bits: shifted
into place they convert exactly, short of a power of two, and unlike a subnormal float32 a subnormal float16
converts whatever the thread's denormal mode is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 16

_I8, _I16, _I32 = (ir.IntType(bits) for bits in (8, 16, 32))
_FLOATS = ir.VectorType(ir.FloatType(), LANES)


def _int8(_context: Any, codes: Any, out: Any, scale: Any) -> Any:
    def generate(codegen: Any, builder: Any, _signature: Any, args: Any) -> Any:
        codes = _load(builder, args[0], ir.VectorType(_I8, LANES))
        wide = builder.sext(codes, ir.VectorType(_I32, LANES))
        _store(
            builder, builder.fmul(builder.sitofp(wide, _FLOATS), _splat(builder, args[2])), args[1]
        )
        return codegen.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), generate


def _int4(_context: Any, codes: Any, out: Any, scale: Any) -> Any:
    def generate(codegen: Any, builder: Any, _signature: Any, args: Any) -> Any:
        wide = builder.zext(_nibbles(builder, args[0]), ir.VectorType(_I32, LANES))
        signed = builder.sub(wide, _constant(_I32, 8))
        values = builder.fmul(builder.sitofp(signed, _FLOATS), _splat(builder, args[2]))
        _store(builder, values, args[1])
        return codegen.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), generate


def _e2m1(_context: Any, codes: Any, out: Any, unit: Any, factor: Any) -> Any:
    def generate(codegen: Any, builder: Any, _signature: Any, args: Any) -> Any:
        wide = builder.zext(_nibbles(builder, args[0]), ir.VectorType(_I16, LANES))
        sign = builder.shl(builder.and_(wide, _constant(_I16, 8)), _constant(_I16, 12))
        magnitude = builder.shl(builder.and_(wide, _constant(_I16, 7)), _constant(_I16, 9))
        bits = builder.or_(sign, magnitude)
        halves = builder.bitcast(bits, ir.VectorType(ir.HalfType(), LANES))
        values = builder.fmul(builder.fpext(halves, _FLOATS), _splat(builder, args[2]))
        _store(builder, builder.fmul(values, _splat(builder, args[3])), args[1])
        return codegen.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.float32), generate


def _e4m3(_context: Any, codes: Any, out: Any, factor: Any) -> Any:
    def generate(codegen: Any, builder: Any, _signature: Any, args: Any) -> Any:
        codes = _load(builder, args[0], ir.VectorType(_I8, LANES))
        wide = builder.zext(codes, ir.VectorType(_I16, LANES))
        sign = builder.shl(builder.and_(wide, _constant(_I16, 0x80)), _constant(_I16, 8))
        magnitude = builder.and_(wide, _constant(_I16, 0x7F))
        bits = builder.or_(sign, builder.shl(magnitude, _constant(_I16, 7)))
        # the only code without a number would be 480
        nan = builder.icmp_unsigned("==", magnitude, _constant(_I16, 0x7F))
        bits = builder.select(nan, builder.or_(bits, _constant(_I16, 0x7E00)), bits)
        halves = builder.bitcast(bits, ir.VectorType(ir.HalfType(), LANES))
        values = builder.fmul(builder.fpext(halves, _FLOATS), _constant(ir.FloatType(), 256.0))
        _store(builder, builder.fmul(values, _splat(builder, args[2])), args[1])
        return codegen.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), generate


def _to_bf16(_context: Any, values: Any, out: Any) -> Any:
    def generate(codegen: Any, builder: Any, _signature: Any, args: Any) -> Any:
        # by integers: the processor's own instruction would flush subnormal numbers
        words = ir.VectorType(_I32, LANES)
        bits = _load(builder, args[0], words)
        odd = builder.and_(builder.lshr(bits, _constant(_I32, 16)), _constant(_I32, 1))
        rounded = builder.add(builder.add(bits, _constant(_I32, 0x7FFF)), odd)
        magnitude = builder.and_(bits, _constant(_I32, 0x7FFFFFFF))
        nan = builder.icmp_unsigned(">", magnitude, _constant(_I32, 0x7F800000))
        rounded = builder.select(nan, _constant(_I32, 0x7FC00000), rounded)
        high = builder.lshr(rounded, _constant(_I32, 16))
        _put(builder, builder.trunc(high, ir.VectorType(_I16, LANES)), args[1])
        return codegen.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _to_half(_context: Any, values: Any, out: Any) -> Any:
    def generate(codegen: Any, builder: Any, _signature: Any, args: Any) -> Any:
        halves = ir.VectorType(ir.HalfType(), LANES)
        _put(builder, builder.fptrunc(_load(builder, args[0], _FLOATS), halves), args[1])
        return codegen.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _nibbles(builder: Any, address: Any) -> Any:
    """<16 x i8>: the nibbles of 8 bytes, low ones first."""
    packed = _load(builder, address, ir.VectorType(_I8, LANES // 2))
    low = builder.and_(packed, _constant(_I8, 15, LANES // 2))
    high = builder.lshr(packed, _constant(_I8, 4, LANES // 2))
    order = [half + 8 * which for half in range(LANES // 2) for which in (0, 1)]
    mask = ir.Constant(ir.VectorType(_I32, LANES), order)
    return builder.shuffle_vector(low, high, mask)


def _load(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def _store(builder: Any, values: Any, address: Any) -> None:
    builder.store(values, builder.inttoptr(address, _FLOATS.as_pointer()), align=4)


def _put(builder: Any, halves: Any, address: Any) -> None:
    builder.store(halves, builder.inttoptr(address, halves.type.as_pointer()), align=2)


def _splat(builder: Any, value: Any) -> Any:
    empty = ir.Constant(_FLOATS, ir.Undefined)
    one = builder.insert_element(empty, value, ir.Constant(_I32, 0))
    zeros = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
    return builder.shuffle_vector(one, empty, zeros)


def _constant(kind: Any, value: float, lanes: int = LANES) -> Any:
    return ir.Constant(ir.VectorType(kind, lanes), [value] * lanes)


e4m3_lanes = cast("Callable[[int, int, Any], None]", intrinsic(_e4m3))
e4m3_lanes.__doc__ = "e4m3_lanes(codes, out, factor): 16 E4M3 at `codes`, times factor, at `out`."
int8_lanes = cast("Callable[[int, int, Any], None]", intrinsic(_int8))
int8_lanes.__doc__ = "int8_lanes(codes, out, scale): 16 int8 at `codes`, times scale, at `out`."
int4_lanes = cast("Callable[[int, int, Any], None]", intrinsic(_int4))
int4_lanes.__doc__ = (
    "int4_lanes(codes, out, scale): (nibble - 8) * scale of 8 bytes, low nibbles first."
)
e2m1_lanes = cast("Callable[[int, int, Any, Any], None]", intrinsic(_e2m1))
e2m1_lanes.__doc__ = (
    "e2m1_lanes(codes, out, unit, factor): (E2M1 / 2^14 * unit) * factor of 8 bytes."
)
bf16_lanes = cast("Callable[[int, int], None]", intrinsic(_to_bf16))
bf16_lanes.__doc__ = "bf16_lanes(values, out): 16 float32 as bfloat16, ties to even."
half_lanes = cast("Callable[[int, int], None]", intrinsic(_to_half))
half_lanes.__doc__ = "half_lanes(values, out): 16 float32 as float16, ties to even."
