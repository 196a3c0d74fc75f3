"""The gated delta rule on the CPU: decode and prefill are the same code, token after token.

A state of one head stays in the first or second level of cache while the tokens of its request pass by, so that
a chunked form has nothing to save but arithmetic, and would round differently at every split of a prompt.
Cut over (request, value head), never over time: any split of a prompt gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from stallwatch_kernels import warmup
from stallwatch_kernels.errors import BadMetadata, BadShape
from stallwatch_kernels.gdn.batch import NULL_SLOT, Batch, Call, Carried, null_batch, over
from stallwatch_kernels.gdn.reference import L2_EPS, Heads
from stallwatch_kernels.gdn.strip import LANES, fma32, strip
from stallwatch_kernels.jit import inlined, kernel, reduction
from stallwatch_kernels.norm.rows import FLOATS, rows_of
from stallwatch_kernels.norm.scalar import ONE, load, store
from stallwatch_kernels.pool import SERIAL, RowPool
from stallwatch_kernels.tensors import Array, apart, contiguous

Rows = tuple[Array, int]
"""Flat memory and the elements from row to row."""

WIDE = 4 * LANES
_wide_read, _thin_read = (strip(v, update=False, follow=True) for v in (4, 1))
_wide_step, _thin_step = (strip(v, update=True, follow=False) for v in (4, 1))
_wide_both, _thin_both = (strip(v, update=True, follow=True) for v in (4, 1))

_NAME = "gated_delta_rule"
_EPS = np.float32(L2_EPS)
_LINEAR_FROM = np.float32(20.0)  # softplus(x) = x from here on, to the last bit of float32


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """A recurrence over `heads`, activations in `dtype`, state in float32."""

    heads: Heads
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Inputs:
    """Static buffers of a step: qkv [tokens, q | k | v] after the convolution, and the gates' a, b [tokens, Hv]."""

    qkv: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor


class GatedDeltaRule:
    """o = q S, with S = S decay + k (v - k S decay) beta; state float32 `[slots, Hv, dk, dv]` in place."""

    def __init__(
        self,
        heads: Heads,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
        pool: RowPool = SERIAL,
    ) -> None:
        if heads.keys < 1 or heads.values % heads.keys:
            raise BadMetadata(
                _NAME, "heads", f"= {heads}: value heads are no multiple of key heads"
            )
        if a_log.shape != (heads.values,) or dt_bias.shape != (heads.values,):
            raise BadShape(_NAME, "a_log, dt_bias", f"must be [{heads.values}] each")
        self.heads = heads
        self._rate: Array = a_log.detach().double().exp().float().numpy()
        self._bias: Array = dt_bias.detach().float().contiguous().numpy()
        self._pool = pool

    def bind(
        self,
        inputs: Inputs,
        out: torch.Tensor,
        carried: Carried,
    ) -> Call:
        """Bind to static buffers; `out` [tokens, Hv * dv] in the inputs' type. The call takes the number of requests."""
        heads, dtype, state = self.heads, inputs.qkv.dtype, carried.state
        qkv = rows_of(_NAME, "qkv", inputs.qkv, heads.width, *FLOATS)
        a = rows_of(_NAME, "a", inputs.a, heads.values, dtype)
        b = rows_of(_NAME, "b", inputs.b, heads.values, dtype)
        result = rows_of(_NAME, "out", out, heads.values * heads.value_size, dtype)
        shape = (heads.values, heads.key_size, heads.value_size)
        if state.ndim != 4 or state.shape[1:] != shape:
            raise BadShape(
                _NAME, "state", f"has shape {tuple(state.shape)}; expected [slots, {shape}]"
            )
        memory = contiguous(_NAME, "state", state, torch.float32)
        read_too = {"qkv": inputs.qkv, "a": inputs.a, "b": inputs.b, "state": state}
        for name, read in read_too.items():
            apart(_NAME, ("out", name), out, read)
        tokens = min(t.shape[0] for t in (inputs.qkv, inputs.a, inputs.b, out))
        batch = Batch(_NAME, carried, tokens)
        pool, values = self._pool, heads.values
        head = (qkv, (a, b), result, memory, (batch.slots, batch.starts), (self._rate, self._bias))
        work = partial(delta_parts, *head, heads.keys)

        def run(requests: int) -> None:
            batch.check(requests)
            over(pool, requests * values, work)

        return run

    def __call__(
        self,
        inputs: Inputs,
        carried: Carried,
    ) -> torch.Tensor:
        """The convenient form: checks, allocates, runs all requests."""
        heads = self.heads
        out = inputs.qkv.new_empty(inputs.qkv.shape[0], heads.values * heads.value_size)
        self.bind(inputs, out, carried)(carried.slots.shape[0])
        return out


@kernel
def delta_parts(  # noqa: PLR0913, PLR0917
    qkv: Rows,
    gates: tuple[Rows, Rows],
    out: Rows,
    state: Array,
    batch: tuple[Array, Array],
    decay: tuple[Array, Array],
    key_heads: int,
    lo: int,
    hi: int,
) -> None:
    """Parts lo to hi; part p is value head p % Hv of request p // Hv."""
    slots, starts = batch
    _, heads, dk, dv = state.shape
    key, query = np.empty((2, dk), np.float32), np.empty(dk, np.float32)
    vectors = np.empty((3, dv), np.float32)
    held, delta, result = vectors[0], vectors[1], vectors[2]
    scale = np.float32(ONE / np.sqrt(np.float32(dk)))
    for part in range(lo, hi):
        r, head = part // heads, part % heads
        begin, end = starts[r], starts[r + 1]
        if slots[r] == NULL_SLOT or begin == end:
            _clear(out, begin, end, head * dv, dv)
            continue
        memory = state[slots[r], head]
        q_from = head // (heads // key_heads) * dk
        k_from, v_from = q_from + key_heads * dk, 2 * key_heads * dk + head * dv
        _normed(_cut(qkv, begin, k_from, dk), key[begin % 2])
        _read(memory, key[begin % 2], held)
        for t in range(begin, end):
            _normed(_cut(qkv, t, q_from, dk), query)
            keep, beta = _gates(gates, t, head, decay)
            values = _cut(qkv, t, v_from, dv)
            for j in range(dv):
                delta[j] = (load(values, j) - held[j] * keep) * beta
            now, following = key[t % 2], key[(t + 1) % 2]
            if t + 1 < end:
                _normed(_cut(qkv, t + 1, k_from, dk), following)
                _step_and_read(memory, keep, now, query, vectors, following)
            else:
                _step(memory, keep, now, query, vectors)
            target = _cut(out, t, head * dv, dv)
            for j in range(dv):
                store(target, j, result[j] * scale)


@inlined
def _cut(rows: Rows, row: int, first: int, width: int) -> Array:
    flat, step = rows
    return flat[row * step + first : row * step + first + width]


@kernel
def _gates(
    gates: tuple[Rows, Rows], t: int, head: int, decay: tuple[Array, Array]
) -> tuple[np.float32, np.float32]:
    """The decay exp(-rate * softplus(a + bias)) and the write strength sigmoid(b), of one token and head."""
    (a, a_step), (b, b_step) = gates
    x = load(a, t * a_step + head) + decay[1][head]
    soft = x if x > _LINEAR_FROM else np.float32(np.log1p(np.exp(x)))
    keep = np.float32(np.exp(-decay[0][head] * soft))
    return keep, np.float32(ONE / (ONE + np.float32(np.exp(-load(b, t * b_step + head)))))


@reduction
def _normed(values: Array, out: Array) -> None:
    """To `out`: values / |values|."""
    total = np.float32(0.0)
    for i in range(out.shape[0]):
        v = load(values, i)
        total += v * v
    scale = np.float32(ONE / np.sqrt(total + _EPS))
    for i in range(out.shape[0]):
        out[i] = load(values, i) * scale


@kernel
def _read(memory: Array, key: Array, held: Array) -> None:
    """To `held`: k S."""
    dk, dv = memory.shape
    s, k, h = memory.ctypes.data, key.ctypes.data, held.ctypes.data
    j = 0
    while j + WIDE <= dv:
        _wide_read(s + 4 * j, 4 * dv, dk, ONE, k, h, k, h, k, h + 4 * j)
        j += WIDE
    while j + LANES <= dv:
        _thin_read(s + 4 * j, 4 * dv, dk, ONE, k, h, k, h, k, h + 4 * j)
        j += LANES
    _narrow_read(memory, key, held, j)


@kernel
def _step(memory: Array, keep: np.float32, key: Array, query: Array, vectors: Array) -> None:  # noqa: PLR0917
    """S = S keep + k delta; to the last of `vectors` (held, delta, result): q S."""
    dk, dv = memory.shape
    s, k, q = memory.ctypes.data, key.ctypes.data, query.ctypes.data
    d, o = vectors[1].ctypes.data, vectors[2].ctypes.data
    j = 0
    while j + WIDE <= dv:
        _wide_step(s + 4 * j, 4 * dv, dk, keep, k, d + 4 * j, q, o + 4 * j, k, o)
        j += WIDE
    while j + LANES <= dv:
        _thin_step(s + 4 * j, 4 * dv, dk, keep, k, d + 4 * j, q, o + 4 * j, k, o)
        j += LANES
    _narrow_step(memory, keep, key, query, vectors, j)


@kernel
def _step_and_read(  # noqa: PLR0917
    memory: Array, keep: np.float32, key: Array, query: Array, vectors: Array, following: Array
) -> None:
    """The same, and to the first of `vectors`: what the next token's key finds in the changed state."""
    dk, dv = memory.shape
    s, k, q, n = memory.ctypes.data, key.ctypes.data, query.ctypes.data, following.ctypes.data
    h, d, o = vectors[0].ctypes.data, vectors[1].ctypes.data, vectors[2].ctypes.data
    j = 0
    while j + WIDE <= dv:
        at = 4 * j
        _wide_both(s + at, 4 * dv, dk, keep, k, d + at, q, o + at, n, h + at)
        j += WIDE
    while j + LANES <= dv:
        at = 4 * j
        _thin_both(s + at, 4 * dv, dk, keep, k, d + at, q, o + at, n, h + at)
        j += LANES
    _narrow_step(memory, keep, key, query, vectors, j)
    _narrow_read(memory, following, vectors[0], j)


@kernel
def _narrow_read(memory: Array, key: Array, held: Array, first: int) -> None:
    """The columns from `first` on, which fill no vector: as a strip does each of its lanes."""
    for j in range(first, memory.shape[1]):
        total = np.float32(0.0)
        for i in range(memory.shape[0]):
            total = fma32(key[i], memory[i, j], total)
        held[j] = total


@kernel
def _narrow_step(  # noqa: PLR0917
    memory: Array, keep: np.float32, key: Array, query: Array, vectors: Array, first: int
) -> None:
    """The columns from `first` on."""
    for j in range(first, memory.shape[1]):
        total = np.float32(0.0)
        for i in range(memory.shape[0]):
            memory[i, j] = fma32(key[i], vectors[1, j], memory[i, j] * keep)
            total = fma32(query[i], memory[i, j], total)
        vectors[2, j] = total


@kernel
def _clear(out: Rows, begin: int, end: int, first: int, width: int) -> None:  # noqa: PLR0917
    zero = np.float32(0.0)
    for t in range(begin, end):
        target = _cut(out, t, first, width)
        for i in range(width):
            store(target, i, zero)


@warmup.of(DeltaSpec)
def _warm(spec: DeltaSpec, shapes: warmup.Shapes) -> Iterable[warmup.Task]:
    def run() -> None:
        heads, rows = spec.heads, max(shapes.rows)
        gate = torch.zeros(rows, heads.values, dtype=spec.dtype)
        inputs = Inputs(torch.zeros(rows, heads.width, dtype=spec.dtype), gate, gate)
        state = torch.zeros(1, heads.values, heads.key_size, heads.value_size)
        zeros = torch.zeros(heads.values)
        GatedDeltaRule(heads, zeros, zeros)(inputs, null_batch(state, rows))

    yield warmup.Task(f"{_NAME} {str(spec.dtype).removeprefix('torch.')}", run)
