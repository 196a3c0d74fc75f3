"""One stored row as float32, and one float32 row as the output type: the inner loops of the gather.

E4M3 and E2M1 are float16 with fewer bits: shifted into place they convert exactly, short of a power of two, and
unlike a subnormal float32 a subnormal float16 converts whatever the thread's denormal mode is.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stallwatch_kernels.jit import inlined
from stallwatch_kernels.ple.memory import (
    bytes_at,
    f32_at,
    f32_to_half,
    half_to_f32,
    u16_at,
    u32_at,
)
from stallwatch_kernels.ple.vectors import (
    LANES,
    bf16_lanes,
    e2m1_lanes,
    e4m3_lanes,
    half_lanes,
    int4_lanes,
    int8_lanes,
)
from stallwatch_kernels.tensors import bf16_to_f32, e4m3_table, f32_to_bf16

F32, BF16, F16 = 0, 1, 2
E4M3 = 3

_E4M3 = e4m3_table()
_E2M1_UNIT = np.float32(16384.0)  # 2^(15-1)


@inlined
def scale_at(address: Any, kind: Any, place: Any) -> Any:
    """The `place`-th scale stored from `address` on."""
    if kind == F32:
        return f32_at(address, place + 1)[place]
    if kind == F16:
        return half_to_f32(u16_at(address, place + 1)[place])
    return _E4M3[bytes_at(address, place + 1)[place]]


@inlined
def scale_is_bad(address: Any, kind: Any, place: Any) -> Any:
    """Whether that scale is NaN, infinite or negative; told by its bits."""
    if kind == F32:
        bits = u32_at(address, place + 1)[place]
        return bits > np.uint32(0x80000000) or (bits & np.uint32(0x7FFFFFFF)) >= np.uint32(
            0x7F800000
        )
    if kind == F16:
        half = u16_at(address, place + 1)[place]
        return half > np.uint16(0x8000) or (half & np.uint16(0x7FFF)) >= np.uint16(0x7C00)
    code = bytes_at(address, place + 1)[place]
    return code > np.uint8(0x80) or code == np.uint8(0x7F)


@inlined
def decode_bf16(codes: Any, out: Any, dim: Any) -> None:
    """`dim` bfloat16 at `codes` to float32 at `out`."""
    source, target = u16_at(codes, dim), f32_at(out, dim)
    for j in range(dim):
        target[j] = bf16_to_f32(source[j])


@inlined
def decode_fp8(codes: Any, out: Any, dim: Any, factor: Any) -> None:
    """`dim` E4M3 at `codes`, times `factor`."""
    whole = dim - dim % LANES
    for first in range(0, whole, LANES):
        e4m3_lanes(codes + first, out + 4 * first, factor)
    source, target = bytes_at(codes, dim), f32_at(out, dim)
    for j in range(whole, dim):
        target[j] = _E4M3[source[j]] * factor


@inlined
def decode_int8(codes: Any, scales: Any, kind: Any, out: Any, dim: Any, group: Any) -> None:  # noqa: PLR0917
    """`dim` int8, each times the scale of its group: 16 elements, or the whole row."""
    step = 0 if group > LANES else 1
    for place in range(dim // LANES):
        scale = scale_at(scales, kind, place * step)
        int8_lanes(codes + LANES * place, out + 4 * LANES * place, scale)
    source, target = bytes_at(codes, dim), f32_at(out, dim)
    for j in range(dim - dim % LANES, dim):
        target[j] = np.float32(np.int8(source[j])) * scale_at(scales, kind, j // LANES * step)


@inlined
def decode_int4(codes: Any, scales: Any, out: Any, dim: Any) -> None:
    """`dim` nibbles less 8, each times the float16 scale of its group of 16."""
    groups = dim // LANES
    factors = u16_at(scales, groups + 1)
    for place in range(groups):
        scale = half_to_f32(factors[place])
        int4_lanes(codes + LANES // 2 * place, out + 4 * LANES * place, scale)
    source, target = bytes_at(codes, dim // 2), f32_at(out, dim)
    for j in range(groups * LANES, dim):
        target[j] = np.float32(_nibble(source[j // 2], j) - 8) * half_to_f32(factors[groups])


@inlined
def decode_nvfp4(codes: Any, scales: Any, out: Any, dim: Any, factor: Any) -> None:  # noqa: PLR0917
    """`dim` E2M1: (code * scale), which is exact, * factor."""
    groups = dim // LANES
    factors = bytes_at(scales, groups + 1)
    for place in range(groups):
        unit = _E4M3[factors[place]] * _E2M1_UNIT
        e2m1_lanes(codes + LANES // 2 * place, out + 4 * LANES * place, unit, factor)
    source, target = bytes_at(codes, dim // 2), f32_at(out, dim)
    for j in range(groups * LANES, dim):
        unit = _E4M3[factors[groups]] * _E2M1_UNIT
        target[j] = (_e2m1_unscaled(_nibble(source[j // 2], j)) * unit) * factor


@inlined
def _nibble(byte: Any, place: Any) -> Any:
    return np.int32((byte >> (4 * (place % 2))) & 15)


@inlined
def _e2m1_unscaled(nibble: Any) -> Any:
    """The value of an E2M1 code / 2^14."""
    code = np.uint32(nibble)
    sign = (code & np.uint32(8)) << np.uint32(12)
    return half_to_f32(np.uint16(((code & np.uint32(7)) << np.uint32(9)) | sign))


@inlined
def cast_row(values: Any, out: Any, dim: Any, kind: Any) -> None:
    """`dim` float32 at `values` to bfloat16 or float16 at `out`, rounded once."""
    whole = dim - dim % LANES
    for first in range(0, whole, LANES):
        if kind == BF16:
            bf16_lanes(values + 4 * first, out + 2 * first)
        else:
            half_lanes(values + 4 * first, out + 2 * first)
    source, target = f32_at(values, dim), u16_at(out, dim)
    for j in range(whole, dim):
        target[j] = f32_to_bf16(source[j]) if kind == BF16 else f32_to_half(source[j])
