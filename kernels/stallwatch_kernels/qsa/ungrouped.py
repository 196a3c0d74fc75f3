"""page4, one row at a time: every row walks its own selection.

A row's bits depend on its own query, selection and cache contents alone: neither on other rows, nor on
where pages lie, nor on the thread that runs it.
"""

from __future__ import annotations

import numpy as np

from stallwatch_kernels.jit import inlined, kernel
from stallwatch_kernels.qsa.layout import Selection, Store
from stallwatch_kernels.qsa.tiles import Ahead, Running, Tokens, absorb, finish, restart
from stallwatch_kernels.tensors import Array


@inlined
def live(selection: Selection, row: int) -> int:
    """How many tokens of the row's request it may read: 0 for a request that does not exist."""
    request = selection.row_req[row]
    if request < 0 or request >= selection.seq_len.shape[0]:
        return 0
    allowed: int = min(selection.seq_len[request], selection.row_pos[row] + 1)
    return allowed


@inlined
def listed(selection: Selection, row: int) -> int:
    """How many indices of the row are to be looked at."""
    count: int = min(selection.counts[row], selection.indices.shape[1])
    return count


@inlined
def page_of(store: Store, selection: Selection, request: int, token: int) -> int:
    """The physical page of a token, or -1."""
    slot = token // store.size
    if slot >= selection.page_table.shape[1]:
        return -1
    page = selection.page_table[request, slot]
    return page if 0 <= page < store.pages else -1


@inlined
def locate(store: Store, selection: Selection, row: int, tokens: Tokens) -> int:
    """Addresses (of KV head 0) of the tokens that the row reads, in the order listed. Returns how many.

    A page is looked up once for the tokens of a block that stand together: the two divisions cost as much as
    a tenth of the token's arithmetic.
    """
    limit, request = live(selection, row), selection.row_req[row]
    listing = selection.indices[row]
    count, open_block, there, k, v = 0, -1, False, 0, 0
    for i in range(listed(selection, row)):
        token = listing[i]
        if token < 0 or token >= limit:
            continue
        block = token >> 2
        if block != open_block:
            open_block = block
            page = page_of(store, selection, request, token)
            there = page >= 0
            inside = (block << 2) % store.size
            k = store.k.at + page * store.k.page + inside * store.k.token
            v = store.v.at + page * store.v.page + inside * store.v.token
        if not there:
            continue
        tokens.k[count] = k + (token & 3) * store.k.token
        tokens.v[count] = v + (token & 3) * store.v.token
        count += 1
    for i in range(count, count + 3):
        tokens.k[i] = tokens.k[max(count - 1, 0)]
    return count


@kernel
def attend(  # noqa: PLR0917
    cache: Array,
    store: Store,
    selection: Selection,
    q: Array,
    out: Array,
    scales: tuple[float, float],
    plan: tuple[int, int, int],
) -> None:
    """Rows `plan[0]..plan[1]` in chunks of `plan[2]` blocks. q, out float32 `[rows, Hq, D]`; `scales` is
    (score to exponent of 2, value). `cache` is an empty array of the cache's element type.
    """
    lo, hi, chunk = plan
    width = selection.indices.shape[1]
    heads, group, size = store.heads, q.shape[1] // store.heads, q.shape[2]
    first = Tokens(np.empty(width + 3, np.int64), np.empty(width + 3, np.int64))
    tokens = Tokens(np.empty(width + 3, np.int64), np.empty(width + 3, np.int64))
    values = np.empty((group, size), np.float32)
    top, total = np.empty(group, np.float32), np.empty(group, np.float32)
    scores = np.empty((group, max(16, 4 * chunk)), np.float32)
    nothing = Ahead(
        np.empty(0, np.int64), np.zeros(3, np.int64), 0
    )  # asking ahead gained nothing here
    for row in range(lo, hi):
        count = locate(store, selection, row, first)
        for head in range(heads):
            for i in range(count + 3):
                tokens.k[i] = first.k[i] + head * store.k.head
            for i in range(count):
                tokens.v[i] = first.v[i] + head * store.v.head
            part = slice(head * group, (head + 1) * group)
            state = Running(q[row, part], values, top, total, scores, nothing)
            restart(state)
            for start in range(0, count, 4 * chunk):
                end = min(start + 4 * chunk, count)
                absorb(cache, state, tokens, (start, end), scales[0])
            finish(state, out[row, part], scales[1])
