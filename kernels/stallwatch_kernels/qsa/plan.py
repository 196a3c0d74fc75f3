"""The union of what eight adjacent rows read, by microblocks of four tokens, planned once per step.

A microblock is (request, logical block). Entries of a group ascend by that key, never by page: where a
page lies cannot change the order of a sum. Each entry carries 32 bits: four tokens of eight rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stallwatch_kernels.jit import inlined, kernel
from stallwatch_kernels.pool import SERIAL, RowPool
from stallwatch_kernels.qsa.layout import Selection, Store
from stallwatch_kernels.qsa.ungrouped import listed, live
from stallwatch_kernels.tensors import Array

GROUP = 8
_END = np.int64(1) << np.int64(62)


@dataclass(frozen=True)
class Plan:
    """`groups` full groups of eight rows; what is left over runs ungrouped.

    Entries of group g are `keys, masks [starts[g] : starts[g] + lengths[g]]`; a key is
    request << 32 | block; bit 4 * row + token of a mask lets that row of the group read that token.
    """

    groups: int
    starts: Array
    lengths: Array
    keys: Array
    masks: Array
    row_blocks: int

    @property
    def loads(self) -> int:
        """Microblocks that the groups read."""
        return int(self.lengths.sum())

    @property
    def reuse(self) -> float:
        """Microblocks that their rows would read alone, over what the groups read; 1 if nothing."""
        return self.row_blocks / self.loads if self.loads else 1.0


def plan(store: Store, selection: Selection, pool: RowPool = SERIAL) -> Plan:
    """Plan all full groups: one quick pass bounds the entries of each, one merges."""
    groups = len(selection.row_req) // GROUP
    room, blocks = np.zeros(groups, np.int64), np.zeros(groups, np.int64)
    pool.run(lambda lo, hi: bound(selection, room, (lo, hi)), groups)
    starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(room)))
    lengths = np.zeros(groups, np.int64)
    keys, masks = np.empty(starts[-1], np.int64), np.empty(starts[-1], np.uint32)
    parts = (starts, lengths, keys, masks, blocks)
    pool.run(lambda lo, hi: merge(store, selection, parts, (lo, hi)), groups)
    return Plan(groups, starts, lengths, keys, masks, int(blocks.sum()))


@inlined
def _decode(store: Store, selection: Selection, row: int, keys: Array, bits: Array) -> None:  # noqa: PLR0917
    """One row's microblocks: keys, ended by _END, and four bits of tokens each. One pass over its indices;
    a page is looked up once a block.
    """
    limit, end, request = live(selection, row), listed(selection, row), selection.row_req[row]
    listing, table = selection.indices[row], selection.page_table
    size, pages, slots = store.size, store.pages, table.shape[1]
    base = np.int64(request) << np.int64(32)
    count, open_block = 0, -1
    for i in range(end):
        token = listing[i]
        if token < 0 or token >= limit:
            continue
        block = token >> 2
        if block != open_block:
            slot = token // size
            if slot >= slots or not 0 <= table[request, slot] < pages:
                continue
            keys[count], bits[count] = base | np.int64(block), np.uint32(0)
            open_block = block
            count += 1
        bits[count - 1] |= np.uint32(1) << np.uint32(token & 3)
    keys[count] = _END


@kernel
def bound(selection: Selection, room: Array, part: tuple[int, int]) -> None:
    """At most how many entries the groups `part` have: changes of block along each row, live or not."""
    for group in range(part[0], part[1]):
        count = 0
        for row in range(group * GROUP, (group + 1) * GROUP):
            indices, end = selection.indices[row], listed(selection, row)
            count += end > 0
            for i in range(1, end):
                count += (indices[i] >> 2) != (indices[i - 1] >> 2)
        room[group] = count


@kernel
def merge(
    store: Store,
    selection: Selection,
    plan: tuple[Array, Array, Array, Array, Array],
    part: tuple[int, int],
) -> None:
    """Fill the entries of the groups `part`: a merge of eight ascending lists. Also counts the blocks that
    the rows of each group would read alone.
    """
    starts, lengths, keys, masks, blocks = plan
    width = selection.indices.shape[1]
    row_keys = np.empty((GROUP, width + 1), np.int64)
    row_bits = np.empty((GROUP, width + 1), np.uint32)
    at = np.empty(GROUP, np.int64)
    for group in range(part[0], part[1]):
        for i in range(GROUP):
            _decode(store, selection, group * GROUP + i, row_keys[i], row_bits[i])
        at[:] = 0
        filled = starts[group]
        while True:
            least = row_keys[0, at[0]]
            for i in range(1, GROUP):
                least = min(least, row_keys[i, at[i]])
            if least == _END:
                break
            mask = np.uint32(0)
            for i in range(GROUP):
                if row_keys[i, at[i]] == least:
                    mask |= row_bits[i, at[i]] << np.uint32(4 * i)
                    at[i] += 1
            keys[filled], masks[filled] = least, mask
            filled += 1
        lengths[group] = filled - starts[group]
        blocks[group] = at.sum()
