"""The compiled passes over routed rows. Each takes a range of columns, so that threads can share a pass.

Rows stand in group order. `weight` is `Stack.operands()`: the panel, format, data, expert and row strides, scales,
their strides, the E4M3 table, k.
"""

from __future__ import annotations

import numpy as np

from stallwatch_kernels.jit import inlined, kernel
from stallwatch_kernels.linear.native import call_panel
from stallwatch_kernels.linear.panel import address
from stallwatch_kernels.tensors import Array

_CHUNK = 64  # rows of x gathered at once: they stay in the second-level cache while weights pass by
_COLUMNS = 512  # columns of a product held at once, likewise

Operands = tuple[int, ...]


@inlined
def silu(value: float) -> float:
    """A value times its sigmoid; no overflow for large -x: x / inf is 0."""
    return np.float32(value / (np.float32(1.0) + np.exp(-value)))  # type: ignore[return-value]


@kernel
def product(  # noqa: PLR0913, PLR0917
    x: Array,
    first: int,
    rows: int,
    weight: Operands,
    expert: int,
    lo: int,
    hi: int,
    y: Array,
    to: int,
) -> None:
    """Rows first .. first + rows - 1 of x with rows lo .. hi - 1 of an expert's matrix, into row `to`, column 0 of y."""
    at_panel, fmt, w, we, ws, s, se, ss, table, k = weight
    call_panel(
        at_panel,
        fmt,
        address(x) + first * 4 * x.shape[1],
        4 * x.shape[1],
        rows,
        w + expert * we + lo * ws,
        ws,
        s + expert * se + lo * ss,
        ss,
        table,
        k,
        hi - lo,
        address(y) + to * 4 * y.shape[1],
        4 * y.shape[1],
    )


@kernel
def gate_up(  # noqa: PLR0913, PLR0917
    x: Array,
    slots: int,
    order: Array,
    experts: Array,
    offsets: Array,
    weight: Operands,
    factors: Array,
    lo: int,
    hi: int,
    h: Array,
) -> None:
    """Set h[:, lo:hi] = silu(gate) * up of every routed row. x float32 [T, H] is read through `order`."""
    inner = h.shape[1]
    width = hi - lo
    gathered = np.empty((_CHUNK, x.shape[1]), np.float32)
    gate = np.empty((_CHUNK, width), np.float32)
    up = np.empty((_CHUNK, width), np.float32)
    for g in range(experts.size):
        expert = experts[g]
        for start in range(offsets[g], offsets[g + 1], _CHUNK):
            rows = min(_CHUNK, offsets[g + 1] - start)
            if rows == 1:
                token = order[start] // slots
                product(x, token, 1, weight, expert, lo, hi, gate, 0)
                product(x, token, 1, weight, expert, inner + lo, inner + hi, up, 0)
            else:
                for i in range(rows):
                    gathered[i] = x[order[start + i] // slots]
                product(gathered, 0, rows, weight, expert, lo, hi, gate, 0)
                product(gathered, 0, rows, weight, expert, inner + lo, inner + hi, up, 0)
            for i in range(rows):
                for c in range(width):
                    value = silu(gate[i, c] * factors[expert, 0])
                    h[start + i, lo + c] = value * (up[i, c] * factors[expert, 1])


@kernel
def down(  # noqa: PLR0913, PLR0917
    h: Array,
    order: Array,
    experts: Array,
    offsets: Array,
    weight: Operands,
    factors: Array,
    lo: int,
    hi: int,
    y: Array,
) -> None:
    """Set y[r, lo:hi] = w2 h of every routed row r: y stands in routed order, token by token, slot by slot."""
    part = np.empty((_CHUNK, _COLUMNS), np.float32)
    for g in range(experts.size):
        expert = experts[g]
        factor = factors[expert, 0]
        for start in range(offsets[g], offsets[g + 1], _CHUNK):
            rows = min(_CHUNK, offsets[g + 1] - start)
            for first in range(lo, hi, _COLUMNS):
                last = min(first + _COLUMNS, hi)
                product(h, start, rows, weight, expert, first, last, part, 0)
                for i in range(rows):
                    row = order[start + i]
                    for c in range(last - first):
                        y[row, first + c] = part[i, c] * factor


@kernel
def combine(  # noqa: PLR0917
    y: Array, weights: Array, lo: int, hi: int, out: Array
) -> None:
    """Set out[t, lo:hi] = the weighted sum over the slots of token t, in slot order."""
    slots = weights.shape[1]
    for token in range(weights.shape[0]):
        for c in range(lo, hi):
            out[token, c] = 0.0
        for slot in range(slots):
            weight = weights[token, slot]
            row = token * slots + slot
            for c in range(lo, hi):
                out[token, c] += weight * y[row, c]


@kernel
def activate(gate_up_rows: Array, h: Array) -> None:
    """Set h = silu(gate) * up of [M, 2 I] rows, gate first."""
    inner = h.shape[1]
    for row in range(h.shape[0]):
        for c in range(inner):
            h[row, c] = silu(gate_up_rows[row, c]) * gate_up_rows[row, inner + c]


@kernel
def add_gated(y: Array, gate: Array, out: Array) -> None:
    """Add: out += sigmoid(gate) * y, one gate [M, 1] per row."""
    for row in range(y.shape[0]):
        share = np.float32(np.float32(1.0) / (np.float32(1.0) + np.exp(-gate[row, 0])))
        for c in range(y.shape[1]):
            out[row, c] += share * y[row, c]
