"""Scalars inside CPU kernels: a value of any float format as float32, and exp without a call to libm.

libm's expf is a call per element and keeps a loop from using vectors; `exp32` is twelve multiplications and
additions in a fixed order, within 2 ulp, so that a loop over it is compiled to vectors and gives the same
bits in the vector body and in its scalar rest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from stallwatch_kernels.jit import inlined
from stallwatch_kernels.tensors import bf16_to_f32, f32_to_bf16

ONE = np.float32(1.0)
TWO = np.float32(2.0)

# Below, exp is under the smallest normal float32; above, it overflows. Between, 2**n has a bit pattern.
_LOWEST = np.float32(-87.0)
_HIGHEST = np.float32(88.0)
_LOG2E = np.float32(1.4426950408889634)
# ln 2 in two parts; the first has nine bits, so that n * _LN2_HIGH is exact for every |n| <= 128.
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
# Adding 1.5 * 2**23 leaves round(x) in the lowest bits of the sum.
_ROUNDER = np.float32(12582912.0)
_ROUNDER_BITS = np.int32(0x4B400000)
_BIAS = np.int32(127)
_MANTISSA = np.int32(23)
_C2 = np.float32(1 / 2)
_C3 = np.float32(1 / 6)
_C4 = np.float32(1 / 24)
_C5 = np.float32(1 / 120)
_C6 = np.float32(1 / 720)
_C7 = np.float32(1 / 5040)


def load(values: Any, index: Any) -> Any:
    """`values[index]` as float32, whether the array holds float32 or the bits of bfloat16."""
    return bf16_to_f32(values[index]) if values.dtype == np.uint16 else values[index]


def store(values: Any, index: Any, value: Any) -> None:
    """`values[index] = value`, rounded once to the array's format."""
    values[index] = f32_to_bf16(value) if values.dtype == np.uint16 else value


# strict=False: numba compares the annotations of the two signatures as well.
@overload(load, strict=False)  # type: ignore[untyped-decorator]
def _load(values: Any, index: Any) -> Any:  # noqa: ARG001
    if values.dtype == types.uint16:
        return lambda values, index: bf16_to_f32(values[index])
    return lambda values, index: values[index]


@overload(store, strict=False)  # type: ignore[untyped-decorator]
def _store(values: Any, index: Any, value: Any) -> Any:  # noqa: ARG001
    def bits(values: Any, index: Any, value: Any) -> None:
        values[index] = f32_to_bf16(value)

    def plain(values: Any, index: Any, value: Any) -> None:
        values[index] = value

    return bits if values.dtype == types.uint16 else plain


@inlined
def exp32(x: np.float32) -> np.float32:
    """e**x for float32. Saturates outside of [-87, 88]; NaN stays NaN."""
    # numba's max and min keep their first argument unless the second one compares beyond it, and nothing
    # compares with NaN: so NaN passes, as long as x stands first.
    x = max(x, _LOWEST)
    x = min(x, _HIGHEST)
    shifted = x * _LOG2E + _ROUNDER
    n = shifted - _ROUNDER
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    p = _C7 * r + _C6
    p = p * r + _C5
    p = p * r + _C4
    p = p * r + _C3
    p = p * r + _C2
    p = p * r + ONE
    p = p * r + ONE
    power = np.int32((np.float32(shifted).view(np.int32) - _ROUNDER_BITS + _BIAS) << _MANTISSA)
    return np.float32(p * power.view(np.float32))


@inlined
def sigmoid32(x: np.float32) -> np.float32:
    """1 / (1 + e**-x)."""
    return np.float32(ONE / (ONE + exp32(-x)))


@inlined
def silu32(x: np.float32) -> np.float32:
    """X times sigmoid(x)."""
    return np.float32(x / (ONE + exp32(-x)))
