"""The causal convolution of GatedDeltaNet on the CPU: decode and prefill are the same code.

Cut over channels, never over time: every channel of a request is computed by one thread in the order of its
tokens, so that a prompt gives the same bits in one piece, in many, or token by token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from stallwatch_kernels import warmup
from stallwatch_kernels.errors import BadShape
from stallwatch_kernels.gdn.batch import NULL_SLOT, Batch, Call, Carried, null_batch, over
from stallwatch_kernels.jit import inlined, kernel
from stallwatch_kernels.norm.rows import FLOATS, rows_of
from stallwatch_kernels.norm.scalar import load, silu32, store
from stallwatch_kernels.pool import SERIAL, RowPool
from stallwatch_kernels.tensors import Array, apart, contiguous

TAPS = 4
Rows = tuple[Array, int]
"""Flat memory and the elements from row to row."""

_NAME = "causal_conv"
_BLOCK = 256  # channels of a part


@dataclass(frozen=True, slots=True)
class ConvSpec:
    """A convolution over `channels` in `dtype`."""

    channels: int
    dtype: torch.dtype


class CausalConv:
    """silu(sum of 4 taps) per channel, carried over state slots `[slots, 3, channels]`, oldest row first."""

    def __init__(self, weight: torch.Tensor, pool: RowPool = SERIAL) -> None:
        """`weight` [channels, 4] as a checkpoint stores it (its middle dimension of one may be present)."""
        flat = weight.detach().flatten(1)
        if flat.shape[-1] != TAPS:
            raise BadShape(_NAME, "weight", f"has {flat.shape[-1]} taps; this kernel has {TAPS}")
        self.channels = flat.shape[0]
        self._taps: Array = flat.float().t().contiguous().numpy()
        self._pool = pool

    def bind(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        carried: Carried,
    ) -> Call:
        """Bind to static buffers: `x`, `out` [tokens, channels] (not the same) and the state, of one type.

        The call takes the number of requests and updates the state in place.
        """
        channels, state = self.channels, carried.state
        xs, x_step = rows_of(_NAME, "x", x, channels, *FLOATS)
        os, o_step = rows_of(_NAME, "out", out, channels, x.dtype)
        if state.ndim != 3 or state.shape[1:] != (TAPS - 1, channels):
            expected = f"[slots, {TAPS - 1}, {channels}]"
            raise BadShape(_NAME, "state", f"has shape {tuple(state.shape)}; expected {expected}")
        past = contiguous(_NAME, "state", state, x.dtype)
        apart(_NAME, ("out", "x"), out, x)
        apart(_NAME, ("out", "state"), out, state)
        batch = Batch(_NAME, carried, min(x.shape[0], out.shape[0]))
        parts = -(-channels // _BLOCK)
        pool = self._pool
        head = ((xs, x_step), (os, o_step), self._taps, past, (batch.slots, batch.starts))

        def run(requests: int) -> None:
            batch.check(requests)
            over(pool, parts, partial(conv_blocks, *head, requests))

        return run

    def __call__(
        self,
        x: torch.Tensor,
        carried: Carried,
    ) -> torch.Tensor:
        """The convenient form: checks, allocates, runs all requests."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self.bind(x, out, carried)(carried.slots.shape[0])
        return out


@kernel
def conv_blocks(  # noqa: PLR0917
    x: Rows,
    out: Rows,
    taps: Array,
    state: Array,
    batch: tuple[Array, Array],
    requests: int,
    lo: int,
    hi: int,
) -> None:
    """Channel blocks lo to hi of all requests."""
    first, last = lo * _BLOCK, min(hi * _BLOCK, taps.shape[1])
    slots, starts = batch
    for r in range(requests):
        begin, end = starts[r], starts[r + 1]
        if slots[r] == NULL_SLOT:
            _clear(out, begin, end, first, last)
            continue
        past = state[slots[r]]
        for t in range(begin, end):
            _token(x, out, taps, past, t, t - begin, first, last)
        _shift(x, past, begin, end, first, last)


@inlined
def _cut(rows: Rows, row: int, first: int, last: int) -> Array:
    flat, step = rows
    return flat[row * step + first : row * step + last]


@kernel
def _token(  # noqa: PLR0917
    x: Rows, out: Rows, taps: Array, past: Array, t: int, age: int, first: int, last: int
) -> None:
    """One token; `age` tokens of its request lie before it in this batch, the older ones in the state."""
    back3 = _cut(x, t - 3, first, last) if age > 2 else past[age, first:last]
    back2 = _cut(x, t - 2, first, last) if age > 1 else past[age + 1, first:last]
    back1 = _cut(x, t - 1, first, last) if age > 0 else past[age + 2, first:last]
    now, result = _cut(x, t, first, last), _cut(out, t, first, last)
    w0, w1, w2, w3 = taps[0, first:], taps[1, first:], taps[2, first:], taps[3, first:]
    for c in range(last - first):
        total = load(back3, c) * w0[c] + load(back2, c) * w1[c]
        total += load(back1, c) * w2[c]
        total += load(now, c) * w3[c]
        store(result, c, silu32(total))


@kernel
def _shift(x: Rows, past: Array, begin: int, end: int, first: int, last: int) -> None:  # noqa: PLR0917
    """Leave in the state the last three rows of what was there and what came."""
    flat, step = x
    count = end - begin
    for j in range(3 if count else 0):
        back = j + count - 3  # the row's place in this batch; negative: it is still an old row
        for c in range(first, last):
            past[j, c] = past[j + count, c] if back < 0 else flat[(begin + back) * step + c]


@kernel
def _clear(out: Rows, begin: int, end: int, first: int, last: int) -> None:  # noqa: PLR0917
    zero = np.float32(0.0)
    for t in range(begin, end):
        row = _cut(out, t, first, last)
        for c in range(last - first):
            store(row, c, zero)


@warmup.of(ConvSpec)
def _warm(spec: ConvSpec, shapes: warmup.Shapes) -> Iterable[warmup.Task]:
    def run() -> None:
        rows = max(shapes.rows)
        x = torch.zeros(rows, spec.channels, dtype=spec.dtype)
        state = torch.zeros(1, TAPS - 1, spec.channels, dtype=spec.dtype)
        CausalConv(torch.zeros(spec.channels, TAPS))(x, null_batch(state, rows))

    yield warmup.Task(f"{_NAME} {str(spec.dtype).removeprefix('torch.')}", run)
