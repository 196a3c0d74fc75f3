"""page4, eight adjacent rows at a time: each microblock of their union is read once.

A chunk of the union is brought into the cache (16-bit and 8-bit elements are widened to float32 on the
way, once for all rows), then each row takes from it the tokens that its mask admits; meanwhile the next
chunk is being fetched. Rows of different
requests may share a group; they have no microblock in common, so nothing leaks between them.
"""

from __future__ import annotations

import numpy as np

from stallwatch_kernels.jit import inlined, kernel
from stallwatch_kernels.qsa.lanes import widen
from stallwatch_kernels.qsa.layout import Cache, Selection, Store
from stallwatch_kernels.qsa.plan import GROUP
from stallwatch_kernels.qsa.tiles import Ahead, Running, Tokens, absorb, finish, restart
from stallwatch_kernels.qsa.ungrouped import page_of
from stallwatch_kernels.tensors import Array

_PACE = 2  # tokens asked for per tile; the least that keeps up with a reuse of 4


@inlined
def _address(store: Store, selection: Selection, key: int, head: int) -> tuple[int, int]:
    """Byte addresses of keys and values of a microblock's first token."""
    request, token = key >> 32, (key & 0xFFFFFFFF) * 4
    page, inside = page_of(store, selection, request, token), token % store.size
    k = store.k.at + page * store.k.page + inside * store.k.token + head * store.k.head
    v = store.v.at + page * store.v.page + inside * store.v.token + head * store.v.head
    return k, v


@inlined
def _bring(cache: Array, source: int, side: Cache, room: Array, slot: int) -> None:  # noqa: PLR0917
    """Four tokens as float32 into `room[4 * slot ...]`."""
    size = room.shape[1]
    for t in range(4):
        to = room.ctypes.data + 4 * size * (4 * slot + t)
        widen(cache, source + t * side.token, size // 16, to)


@inlined
def _foresee(  # noqa: PLR0917
    store: Store, selection: Selection, keys: Array, head: int, ahead: Ahead
) -> None:
    """The next chunk's tokens, to be fetched while this one is computed."""
    count = 0
    for e in range(keys.shape[0]):
        k, v = _address(store, selection, keys[e], head)
        for t in range(4):
            ahead.at[count] = k + t * store.k.token
            ahead.at[count + 1] = v + t * store.v.token
            count += 2
    ahead.cursor[0], ahead.cursor[1], ahead.cursor[2] = 0, count, _PACE


@inlined
def _admit(tokens: Tokens, places: Tokens, masks: Array, row: int, strides: tuple[int, int]) -> int:  # noqa: PLR0917
    """The tokens of the chunk that one row of the group reads. Returns how many."""
    count = 0
    for e in range(masks.shape[0]):
        bits = (masks[e] >> np.uint32(4 * row)) & np.uint32(15)
        for t in range(
            4
        ):  # every token is written, the next one over it if not admitted: no branch
            tokens.k[count] = places.k[e] + t * strides[0]
            tokens.v[count] = places.v[e] + t * strides[1]
            count += int((bits >> np.uint32(t)) & np.uint32(1))
    for i in range(count, count + 3):
        tokens.k[i] = tokens.k[max(count - 1, 0)]
    return count


@kernel
def attend_groups(  # noqa: PLR0917
    cache: Array,
    store: Store,
    selection: Selection,
    q: Array,
    out: Array,
    scales: tuple[float, float],
    plan: tuple[Array, Array, Array, Array],
    part: tuple[int, int, int],
) -> None:
    """Groups `part[0]..part[1]` in chunks of `part[2]` blocks; otherwise as `ungrouped.attend`."""
    starts, lengths, keys, masks = plan
    lo, hi, chunk = part
    heads, group, size = store.heads, q.shape[1] // store.heads, q.shape[2]
    plain = np.empty(0, np.float32)
    wide = cache.itemsize < 4
    places = Tokens(np.empty(chunk, np.int64), np.empty(chunk, np.int64))
    tokens = Tokens(np.empty(4 * chunk + 3, np.int64), np.empty(4 * chunk + 3, np.int64))
    room = np.empty((2, 4 * chunk if wide else 0, size), np.float32)
    values = np.empty((GROUP, group, size), np.float32)
    top, total = np.empty((GROUP, group), np.float32), np.empty((GROUP, group), np.float32)
    scores = np.empty((group, max(16, 4 * chunk)), np.float32)
    strides = (4 * size, 4 * size) if wide else (store.k.token, store.v.token)
    ahead = Ahead(np.empty(8 * chunk, np.int64), np.zeros(3, np.int64), size * cache.itemsize)
    for g in range(lo, hi):
        first, start, end = g * GROUP, starts[g], starts[g] + lengths[g]
        for head in range(heads):
            mine = slice(head * group, (head + 1) * group)
            for row in range(GROUP):
                restart(
                    Running(q[first + row, mine], values[row], top[row], total[row], scores, ahead)
                )
            for c in range(start, end, chunk):
                taken = min(chunk, end - c)
                for e in range(taken):
                    k, v = _address(store, selection, keys[c + e], head)
                    if wide:
                        _bring(cache, k, store.k, room[0], e)
                        _bring(cache, v, store.v, room[1], e)
                        k = room[0].ctypes.data + 16 * size * e
                        v = room[1].ctypes.data + 16 * size * e
                    places.k[e], places.v[e] = k, v
                _foresee(
                    store, selection, keys[c + taken : min(c + taken + chunk, end)], head, ahead
                )
                for row in range(GROUP):
                    count = _admit(tokens, places, masks[c : c + taken], row, strides)
                    if count:
                        state = Running(
                            q[first + row, mine],
                            values[row],
                            top[row],
                            total[row],
                            scores,
                            ahead,
                        )
                        absorb(plain, state, tokens, (0, count), scales[0])
            for row in range(GROUP):
                state = Running(
                    q[first + row, mine], values[row], top[row], total[row], scores, ahead
                )
                finish(state, out[first + row, mine], scales[1])
