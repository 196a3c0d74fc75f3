"""Online softmax over a few tokens at a time: the step that grouped and ungrouped share.

One query row and one KV head: its `group` query heads read the same keys. A call adds the tokens
`lo..hi` of an address list to running maximum, running sum and weighted values.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stallwatch_kernels.jit import inlined
from stallwatch_kernels.qsa.lanes import exponentials, fetch, peak, score_tile, value_tile
from stallwatch_kernels.tensors import Array

LANES = 16


class Tokens(NamedTuple):
    """Byte addresses of keys and values, int64. Three more keys than tokens: a tile reads four."""

    k: Array
    v: Array


class Ahead(NamedTuple):
    """What will be read next: byte addresses of `bytes_` each; `cursor` is [next, end, how many a tile]."""

    at: Array
    cursor: Array
    bytes_: int


class Running(NamedTuple):
    """State of one row and KV head: query `[group, D]`, weighted values `[group, D]`, maximum of
    the scores and sum `[group]`, and room for the scores of a chunk `[group, 16 * n]`.
    """

    q: Array
    values: Array
    top: Array
    total: Array
    scores: Array
    ahead: Ahead


@inlined
def restart(state: Running) -> None:
    """Nothing read yet."""
    state.top[:] = -np.inf
    state.total[:] = 0.0
    state.values[:] = 0.0


@inlined
def absorb(  # noqa: PLR0917
    cache: Array, state: Running, tokens: Tokens, span: tuple[int, int], scale: float
) -> None:
    """Add tokens `span[0]..span[1]`. `scale` turns a dot product into an exponent of 2."""
    lo, hi = span
    steps = _score(cache, state, tokens.k, lo, hi)
    width = state.scores.shape[1]
    for h in range(state.q.shape[0]):
        at = state.scores.ctypes.data + 4 * h * width
        top = peak(at, steps)
        if top > state.top[h]:
            shrink = np.float32(np.exp2((state.top[h] - top) * np.float32(scale)))
            state.top[h] = top
            state.total[h] *= shrink
            for d in range(state.values.shape[1]):
                state.values[h, d] *= shrink
        state.total[h] += exponentials(at, steps, np.float32(scale), state.top[h])
    _mix(cache, state, tokens.v, lo, hi)


@inlined
def _score(cache: Array, state: Running, keys: Array, lo: int, hi: int) -> int:  # noqa: PLR0917
    """Dot products into `state.scores`, filled up with -inf to whole vectors. Returns the vectors."""
    group, size = state.q.shape
    width = state.scores.shape[1]
    out, q = state.scores.ctypes.data, state.q.ctypes.data
    begin, end, pace = state.ahead.cursor[0], state.ahead.cursor[1], state.ahead.cursor[2]
    places, lines = state.ahead.at.ctypes.data, (state.ahead.bytes_ + 63) // 64
    for t in range(lo, hi, 4):
        at = keys.ctypes.data + 8 * t
        column = out + 4 * (t - lo)
        asked = min(pace, end - begin)
        fetch(places + 8 * begin, asked, lines)
        begin += asked
        h = 0
        while h < group:
            rows, place = (q + 4 * h * size, size), (column + 4 * h * width, width)
            if group - h >= 6:
                score_tile(cache, 6, rows, at, size // 16, place)
                h += 6
            elif group - h >= 4:
                score_tile(cache, 4, rows, at, size // 16, place)
                h += 4
            elif group - h >= 2:
                score_tile(cache, 2, rows, at, size // 16, place)
                h += 2
            else:
                score_tile(cache, 1, rows, at, size // 16, place)
                h += 1
    state.ahead.cursor[0] = begin
    steps = (hi - lo + LANES - 1) // LANES
    for h in range(group):
        for t in range(hi - lo, steps * LANES):
            state.scores[h, t] = -np.inf
    return steps


@inlined
def _mix(cache: Array, state: Running, values: Array, lo: int, hi: int) -> None:  # noqa: PLR0917
    """Weighted values, 64 columns at a time, then 16."""
    group, size = state.values.shape
    d = 0
    while d < size:
        h = 0
        wide = 64 if size - d >= 64 else 16
        while h < group:
            weights = (
                state.scores.ctypes.data + 4 * h * state.scores.shape[1],
                state.scores.shape[1],
            )
            tokens = (values.ctypes.data + 8 * lo, d * cache.itemsize)
            out = (state.values.ctypes.data + 4 * (h * size + d), size)
            if wide == 64:
                h += _mix_wide(cache, group - h, weights, tokens, hi - lo, out)
            else:
                value_tile(cache, 9, weights, tokens, hi - lo, out)
                h += 1
        d += wide


@inlined
def _mix_wide(  # noqa: PLR0917
    cache: Array,
    heads: int,
    weights: tuple[int, int],
    tokens: tuple[int, int],
    count: int,
    out: tuple[int, int],
) -> int:
    """64 columns for as many heads as one tile takes. Returns how many."""
    if heads >= 6:
        value_tile(cache, 6 * 8 + 4, weights, tokens, count, out)
        return 6
    if heads >= 4:
        value_tile(cache, 4 * 8 + 4, weights, tokens, count, out)
        return 4
    if heads >= 2:
        value_tile(cache, 2 * 8 + 4, weights, tokens, count, out)
        return 2
    value_tile(cache, 1 * 8 + 4, weights, tokens, count, out)
    return 1


@inlined
def finish(state: Running, out: Array, scale: float) -> None:
    """Normalised values times `scale`; zeros when nothing was read."""
    group, size = state.values.shape
    for h in range(group):
        total = state.total[h]
        empty = state.top[h] == -np.inf and total == 0.0
        factor = np.float32(0.0) if empty else np.float32(scale) / total
        for d in range(size):
            out[h, d] = state.values[h, d] * factor
