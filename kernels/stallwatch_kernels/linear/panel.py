"""Some rows of a weight against all rows of x: what linear layers and experts are made of.

Addresses and strides in bytes, because one compiled function then serves every tensor, whatever its type,
and a call from Python costs no array unboxing. Callers check shapes first. `native` compiles it.
"""

from __future__ import annotations

import numpy as np

from stallwatch_kernels.jit import inlined, kernel
from stallwatch_kernels.linear.lanes import expansion, strip
from stallwatch_kernels.linear.vectors import BF16, F32, LANES, NVFP4
from stallwatch_kernels.tensors import Array

_COLUMNS, _ROWS = 4, 4  # a tile: 16 accumulators, half of the registers of AVX-512
_AHEAD_ROWS = 16  # while memory is the limit, ask for the next strip; beyond, the asking costs more

# Beyond so many rows a weight is decoded once to float32 and then read several times (measured crossings).
_DIRECT_BF16, _DIRECT_NVFP4 = 16, 8

# The one to three columns left over go row by row: few, and each tile costs compile time.
_strip_f32, _one_f32 = strip(_COLUMNS, F32, _ROWS), strip(1, F32, 1)
_strip_ahead_f32 = strip(_COLUMNS, F32, _ROWS, ahead=True)
_strip_bf16, _one_bf16 = strip(_COLUMNS, BF16, _ROWS, ahead=True), strip(1, BF16, 1)
_strip_nvfp4, _one_nvfp4 = strip(_COLUMNS, NVFP4, _ROWS, ahead=True), strip(1, NVFP4, 1)
_expand_bf16, _expand_one_bf16 = expansion(_COLUMNS, BF16), expansion(1, BF16)
_expand_nvfp4, _expand_one_nvfp4 = expansion(_COLUMNS, NVFP4), expansion(1, NVFP4)


@inlined
def address(data: Array) -> int:
    """Where an array lies, as the signed integer that strides can be added to (numba's own is unsigned)."""
    return np.int64(data.ctypes.data)  # type: ignore[return-value]


@kernel
def _direct(  # noqa: PLR0913, PLR0917
    fmt: int,
    x: int,
    xs: int,
    m: int,
    w: int,
    ws: int,
    s: int,
    ss: int,
    t: int,
    k: int,
    columns: int,
    y: int,
    ys: int,
) -> None:
    n = 0
    ahead = m <= _AHEAD_ROWS and columns > _COLUMNS
    while n < columns:
        four = columns - n >= _COLUMNS
        at_w, at_s, at_y = w + n * ws, s + n * ss, y + 4 * n
        if fmt == F32:
            if four and ahead:
                _strip_ahead_f32(x, xs, at_w, ws, at_s, ss, t, k, at_y, ys, m)
            elif four:
                _strip_f32(x, xs, at_w, ws, at_s, ss, t, k, at_y, ys, m)
            else:
                _one_f32(x, xs, at_w, ws, at_s, ss, t, k, at_y, ys, m)
        elif fmt == BF16:
            if four:
                _strip_bf16(x, xs, at_w, ws, at_s, ss, t, k, at_y, ys, m)
            else:
                _one_bf16(x, xs, at_w, ws, at_s, ss, t, k, at_y, ys, m)
        elif four:
            _strip_nvfp4(x, xs, at_w, ws, at_s, ss, t, k, at_y, ys, m)
        else:
            _one_nvfp4(x, xs, at_w, ws, at_s, ss, t, k, at_y, ys, m)
        n += _COLUMNS if four else 1


@kernel
def _expand(  # noqa: PLR0913, PLR0917
    fmt: int, w: int, ws: int, s: int, ss: int, t: int, k: int, columns: int, y: int, ys: int
) -> None:
    if fmt == BF16 and columns == _COLUMNS:
        _expand_bf16(w, ws, s, ss, t, k, y, ys)
    elif fmt == BF16:
        _expand_one_bf16(w, ws, s, ss, t, k, y, ys)
    elif columns == _COLUMNS:
        _expand_nvfp4(w, ws, s, ss, t, k, y, ys)
    else:
        _expand_one_nvfp4(w, ws, s, ss, t, k, y, ys)


def panel(  # noqa: PLR0913, PLR0917
    fmt: int,
    x: int,
    xs: int,
    m: int,
    w: int,
    ws: int,
    s: int,
    ss: int,
    t: int,
    k: int,
    columns: int,
    y: int,
    ys: int,
) -> None:
    """y[i, n] = <x[i], w[n]> for i < m and n < columns; x and y float32, w in format `fmt`.

    s, ss, t: block scales, their row stride and the 256 floats of E4M3, read for NVFP4 alone, for which
    the result still lacks half of the global scale. The bits of y[i, n] depend on x[i] and w[n] alone.
    """
    if fmt == F32 or m <= (_DIRECT_BF16 if fmt == BF16 else _DIRECT_NVFP4):
        _direct(fmt, x, xs, m, w, ws, s, ss, t, k, columns, y, ys)
        return
    padded = (k + LANES - 1) // LANES * LANES
    wide = np.empty((_COLUMNS, padded), np.float32)
    at = address(wide)
    n = 0
    while n < columns:
        count = _COLUMNS if columns - n >= _COLUMNS else 1
        _expand(fmt, w + n * ws, ws, s + n * ss, ss, t, k, count, at, padded * 4)
        _direct(F32, x, xs, m, at, padded * 4, 0, 0, 0, k, count, y + 4 * n, ys)
        n += count
