# ruff: noqa: ARG001 - an intrinsic declares its arguments to numba, and reads them as `args`
"""Memory by address inside compiled kernels, and the two conversions that numba lacks on a CPU.

A table may be one tensor, or a hundred memory maps. Kernels that took them as arrays would be compiled
again for each number of shards, so they take addresses. Whoever passes one holds the memory, and has
checked the bounds: nothing here can.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from stallwatch_kernels.jit import inlined
from stallwatch_kernels.tensors import Array

_BYTE_POINTER = ir.IntType(8).as_pointer()
_I32 = ir.IntType(32)


def _pointer(_context: Any, address: Any) -> Any:
    def generate(_codegen: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], _BYTE_POINTER)

    return types.voidptr(types.int64), generate


def _copy(_context: Any, target: Any, source: Any, size: Any) -> Any:
    def generate(_codegen: Any, builder: Any, _signature: Any, args: Any) -> Any:
        to = builder.inttoptr(args[0], _BYTE_POINTER)
        come = builder.inttoptr(args[1], _BYTE_POINTER)
        cgutils.raw_memcpy(builder, to, come, args[2], 1)
        return _codegen.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def _prefetch(_context: Any, address: Any) -> Any:
    def generate(codegen: Any, builder: Any, _signature: Any, args: Any) -> Any:
        signature = ir.FunctionType(ir.VoidType(), [_BYTE_POINTER, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0i8")
        read, keep, data = (ir.Constant(_I32, number) for number in (0, 3, 1))
        builder.call(function, [builder.inttoptr(args[0], _BYTE_POINTER), read, keep, data])
        return codegen.get_dummy_value()

    return types.void(types.int64), generate


def _from_half(_context: Any, bits: Any) -> Any:
    def generate(_codegen: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


def _to_half(_context: Any, value: Any) -> Any:
    def generate(_codegen: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), generate


_pointer_at = cast("Callable[[int], Any]", intrinsic(_pointer))
copy = cast("Callable[[Any, Any, Any], None]", intrinsic(_copy))
copy.__doc__ = "copy(target, source, size): so many bytes, which must not overlap."
prefetch = cast("Callable[[Any], None]", intrinsic(_prefetch))
prefetch.__doc__ = "prefetch(address): start loading that cache line; never faults."
half_to_f32 = cast("Callable[[Any], np.float32]", intrinsic(_from_half))
half_to_f32.__doc__ = "half_to_f32(bits): a float16 given by its bits. Exact."
f32_to_half = cast("Callable[[Any], np.uint16]", intrinsic(_to_half))
f32_to_half.__doc__ = "f32_to_half(value): rounded to the nearest float16, ties to even."


@inlined
def bytes_at(address: int, size: int) -> Array:
    """uint8[size] at `address`."""
    viewed: Array = carray(_pointer_at(address), (size,), np.uint8)
    return viewed


@inlined
def u16_at(address: int, size: int) -> Array:
    """uint16[size] at `address`."""
    viewed: Array = carray(_pointer_at(address), (size,), np.uint16)
    return viewed


@inlined
def u32_at(address: int, size: int) -> Array:
    """uint32[size] at `address`."""
    viewed: Array = carray(_pointer_at(address), (size,), np.uint32)
    return viewed


@inlined
def f32_at(address: int, size: int) -> Array:
    """float32[size] at `address`."""
    viewed: Array = carray(_pointer_at(address), (size,), np.float32)
    return viewed


@inlined
def i64_at(address: int, size: int) -> Array:
    """int64[size] at `address`."""
    viewed: Array = carray(_pointer_at(address), (size,), np.int64)
    return viewed
