"""Which tokens a row reads: its best blocks, and always the causal tail that no complete block holds yet.

Ties are settled by order: score descending, block ascending (relu makes exact zeros, hence ties, common).
No sort: scores are not negative, so their bits order them, and three counting passes find the cut.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from stallwatch_kernels.errors import BadMetadata
from stallwatch_kernels.jit import inlined, kernel
from stallwatch_kernels.pool import SERIAL, RowPool
from stallwatch_kernels.qsa.indexer import (
    KERNEL,
    KeyCache,
    Keys,
    Places,
    Where,
    prepare,
    reach,
    score_row,
)
from stallwatch_kernels.qsa.layout import BLOCK
from stallwatch_kernels.tensors import Array, apart, check_rows, contiguous


def width_of(budget: int) -> int:
    """Columns of `indices`: the budget and a tail of at most three tokens."""
    return budget + BLOCK - 1


def select(
    q: torch.Tensor, cache: KeyCache, where: Where, *, budget: int, pool: RowPool = SERIAL
) -> tuple[torch.Tensor, torch.Tensor]:
    """`indices int32[rows, budget + 3]` (logical tokens, ascending, -1 padded), `counts int32[rows]`.

    `q [rows, heads, d]` normed and turned; `budget` in tokens, a multiple of 4. Scores are kept for one
    row at a time.
    """
    if budget <= 0 or budget % BLOCK:
        raise BadMetadata(KERNEL, "budget", f"is {budget}; expected a positive multiple of {BLOCK}")
    query = prepare(q, cache, where)
    rows = q.shape[0]
    indices = torch.empty(rows, width_of(budget), dtype=torch.int32)
    counts = torch.empty(rows, dtype=torch.int32)
    outputs = indices.numpy(), counts.numpy()
    pool.run(
        lambda lo, hi: _select(query.kind, query.keys, query.places, query.q, outputs, (lo, hi)),
        rows,
    )
    return indices, counts


def bind_select(  # noqa: PLR0917
    q: torch.Tensor, cache: KeyCache, where: Where, indices: torch.Tensor, counts: torch.Tensor
) -> Callable[[int], None]:
    """`select` between static buffers (float32 q, contiguous); a call takes the rows."""
    query = prepare(q, cache, where)
    if q.dtype != torch.float32 or not q.is_contiguous():
        raise BadMetadata(KERNEL, "q", "must be float32 and contiguous to be bound")
    outputs = (
        contiguous(KERNEL, "indices", indices, torch.int32),
        contiguous(KERNEL, "counts", counts, torch.int32),
    )
    if outputs[0].ndim != 2 or len(outputs[0]) != len(q) or outputs[1].shape != (len(q),):
        raise BadMetadata(KERNEL, "indices", f"and counts are not for the {len(q)} rows of q")
    columns = outputs[0].shape[1]
    if columns != width_of(columns - columns % BLOCK) or columns < width_of(BLOCK):
        problem = f"have {columns} columns; expected a budget, a multiple of {BLOCK}, and 3 more"
        raise BadMetadata(KERNEL, "indices", problem)
    for name, read in (("q", q), ("row_req", where.row_req), ("row_pos", where.row_pos)):
        apart(KERNEL, ("indices", name), indices, read)
        apart(KERNEL, ("counts", name), counts, read)

    def run(rows: int) -> None:
        check_rows(KERNEL, rows, len(outputs[1]))
        _select(query.kind, query.keys, query.places, query.q, outputs, (0, rows))

    return run


@inlined
def cut(bits: Array, wanted: int) -> tuple[np.uint32, int]:
    """The `wanted`-th largest of non-negative floats given by their bits, and how many equal to it belong
    to the `wanted` largest.
    """
    counts = np.empty(2048, np.int64)
    prefix, known = np.uint32(0), np.uint32(0)
    left = wanted
    for level in range(3):
        shift = np.uint32(21 if level == 0 else (10 if level == 1 else 0))
        size = 1024 if level == 2 else 2048
        counts[:] = 0
        for value in bits:
            if (value & known) == prefix:
                counts[(value >> shift) & np.uint32(size - 1)] += 1
        digit = size - 1
        while counts[digit] < left:
            left -= counts[digit]
            digit -= 1
        prefix |= np.uint32(digit) << shift
        known |= np.uint32(size - 1) << shift
    return prefix, left


@inlined
def take(scores: Array, blocks: int, limit: int, out: Array) -> int:
    """Tokens of the best `blocks` blocks and the tail up to `limit`, ascending, into `out`, -1 padded.
    Returns how many.
    """
    visible, count = scores.shape[0], 0
    everything = visible <= blocks
    edge, ties = np.uint32(0), 0
    bits = scores.view(np.uint32)
    if not everything:
        edge, ties = cut(bits, blocks)
    for block in range(visible):
        chosen = everything or bits[block] > edge
        if not chosen and bits[block] == edge and ties > 0:
            chosen = True
            ties -= 1
        if chosen:
            for t in range(4):
                out[count + t] = 4 * block + t
            count += 4
    for token in range(4 * visible, limit):
        out[count] = token
        count += 1
    out[count:] = -1
    return count


@kernel
def _select(  # noqa: PLR0917
    kind: Array,
    keys: Keys,
    places: Places,
    q: Array,
    outputs: tuple[Array, Array],
    part: tuple[int, int],
) -> None:
    indices, counts = outputs
    blocks = (indices.shape[1] - 3) // 4
    longest = 0
    for row in range(part[0], part[1]):
        longest = max(longest, reach(places, row) // 4)
    scores = np.empty(longest, np.float32)
    for row in range(part[0], part[1]):
        limit = reach(places, row)
        mine = scores[: limit // 4]
        if limit // 4 > blocks:
            score_row(kind, keys, q[row], places.row_req[row], mine)
        counts[row] = take(mine, blocks, limit, indices[row])


def take_blocks(scores: torch.Tensor, budget: int, limit: int) -> list[int]:
    """The selection of one row from its scores alone: tokens, ascending. For tests and tools."""
    out = np.empty(width_of(budget), np.int32)
    bits = scores.detach().float().contiguous().numpy()
    count = _take(bits, budget // BLOCK, limit, out)
    return [int(token) for token in out[:count]]


@kernel
def _take(scores: Array, blocks: int, limit: int, out: Array) -> int:
    return take(scores, blocks, limit, out)
