"""The indexer's keys and scores: one compressed key per four tokens.

A compressed key is the float32 mean of four RAW keys, cast, then normed, then turned by the position of the
group's FIRST token. A block's score for a query is sum over heads of relu(q . key) / sqrt(d), in float32.
Source: Qwen4-Exp's sparse attention indexer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from stallwatch_kernels.errors import BadDtype, BadLayout, BadShape
from stallwatch_kernels.jit import inlined, kernel
from stallwatch_kernels.pool import SERIAL, RowPool
from stallwatch_kernels.qsa.lanes import score_tile
from stallwatch_kernels.qsa.layout import BLOCK
from stallwatch_kernels.qsa.rotary import Rotary, rms_norm, rotate
from stallwatch_kernels.tensors import Array, apart, check_rows, contiguous

KERNEL = "indexer"
KEY_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_BITS: dict[torch.dtype, tuple[torch.dtype, type[np.generic]]] = {
    torch.float32: (torch.float32, np.float32),
    torch.float16: (torch.int16, np.int16),
    torch.bfloat16: (torch.uint16, np.uint16),
}


@dataclass(frozen=True)
class KeyCache:
    """Compressed keys `[pages, page, d]` (d contiguous) and `page_table int32[R, max_pages]`.

    `page` counts blocks. A cache with a slot per request is the same with one page per request.
    """

    keys: torch.Tensor
    page_table: torch.Tensor


@dataclass(frozen=True)
class Where:
    """`row_req, row_pos int32[rows]` and `seq_len int32[R]` as in `layout.Rows`."""

    row_req: torch.Tensor
    row_pos: torch.Tensor
    seq_len: torch.Tensor


class Keys(NamedTuple):
    """A key cache for compiled code: byte address and strides, pages, blocks per page, the table."""

    at: int
    page: int
    block: int
    pages: int
    size: int
    table: Array


class Places(NamedTuple):
    """`Where` as arrays."""

    row_req: Array
    row_pos: Array
    seq_len: Array


@dataclass(frozen=True)
class Query:
    """Checked arguments of scoring, as compiled code wants them. Keeps the cache's tensor alive."""

    cache: KeyCache
    kind: Array
    keys: Keys
    places: Places
    q: Array


def prepare(q: torch.Tensor, cache: KeyCache, where: Where) -> Query:
    """Check `q [rows, heads, d]` (normed and turned) against the cache, before any memory is touched."""
    keys = cache.keys
    if keys.dtype not in KEY_DTYPES:
        raise BadDtype(KERNEL, "keys", f"is {keys.dtype}; expected float32, float16 or bfloat16")
    if keys.ndim != 3 or keys.device.type != "cpu" or keys.stride(2) != 1:
        raise BadLayout(KERNEL, "keys", f"is {tuple(keys.shape)}, strides {tuple(keys.stride())}")
    if q.ndim != 3 or q.shape[2] != keys.shape[2] or q.shape[1] == 0:
        raise BadShape(KERNEL, "q", f"is {tuple(q.shape)}; expected [rows, heads, {keys.shape[2]}]")
    if 0 in keys.shape[1:]:
        raise BadShape(KERNEL, "keys", f"is {tuple(keys.shape)}; expected no empty page")
    if keys.shape[2] % 16:
        raise BadShape(KERNEL, "keys", f"have head size {keys.shape[2]}; expected a multiple of 16")
    if q.dtype not in KEY_DTYPES:
        raise BadDtype(KERNEL, "q", f"is {q.dtype}; expected float32, float16 or bfloat16")
    if q.device.type != "cpu":
        raise BadLayout(KERNEL, "q", f"is on {q.device}, and this path runs on the CPU")
    table = contiguous(KERNEL, "page_table", cache.page_table, torch.int32)
    places = Places(
        *(contiguous(KERNEL, n, getattr(where, n), torch.int32) for n in Places._fields)
    )
    if places.row_req.shape != (q.shape[0],) or places.row_pos.shape != (q.shape[0],):
        raise BadShape(KERNEL, "row_req", f"or row_pos is not for the {q.shape[0]} rows of q")
    if table.ndim != 2 or places.seq_len.shape != (table.shape[0],):
        raise BadShape(KERNEL, "seq_len", f"is {places.seq_len.shape} for table {table.shape}")
    step = keys.element_size()
    return Query(
        cache=cache,
        kind=np.empty(0, _BITS[keys.dtype][1]),
        keys=Keys(
            keys.data_ptr(),
            keys.stride(0) * step,
            keys.stride(1) * step,
            keys.shape[0],
            keys.shape[1],
            table,
        ),
        places=places,
        q=q.detach().float().contiguous().numpy(),
    )


@inlined
def reach(places: Places, row: int) -> int:
    """How many tokens the row may see: 0 for a request that does not exist."""
    request = places.row_req[row]
    if request < 0 or request >= places.seq_len.shape[0]:
        return 0
    allowed: int = max(0, min(places.seq_len[request], places.row_pos[row] + 1))
    return allowed


@inlined
def score_row(kind: Array, keys: Keys, q: Array, request: int, out: Array) -> None:  # noqa: PLR0917
    """Scores of blocks 0..len(out) for one row's query `[heads, d]`. A block without a page scores 0."""
    heads, size = q.shape
    room = np.empty((heads, 4), np.float32)
    places = np.empty(4, np.int64)
    there = np.empty(4, np.bool_)
    root = np.float32(np.sqrt(np.float32(size)))
    for first in range(0, out.shape[0], 4):
        last = min(4, out.shape[0] - first)
        for i in range(4):
            block = first + min(i, last - 1)
            slot, page = block // keys.size, -1
            if slot < keys.table.shape[1]:
                page = keys.table[request, slot]
            there[i] = 0 <= page < keys.pages
            places[i] = keys.at + max(page, 0) * keys.page + (block % keys.size) * keys.block
            if not there[i]:
                places[i] = keys.at
        if keys.pages > 0:
            for h in range(0, heads, 4):
                many = (q.ctypes.data + 4 * h * size, size)
                place = (room.ctypes.data + 16 * h, 4)
                if heads - h >= 4:
                    score_tile(kind, 4, many, places.ctypes.data, size // 16, place)
                else:
                    for one in range(heads - h):
                        single = (q.ctypes.data + 4 * (h + one) * size, size)
                        to = (room.ctypes.data + 16 * (h + one), 4)
                        score_tile(kind, 1, single, places.ctypes.data, size // 16, to)
        for i in range(last):
            total = np.float32(0.0)
            if there[i]:
                for h in range(heads):
                    value = room[h, i]
                    total += value if not value <= 0 else np.float32(0.0)
            out[first + i] = total / root


@kernel
def _score(  # noqa: PLR0917
    kind: Array, keys: Keys, places: Places, q: Array, out: Array, part: tuple[int, int]
) -> None:
    for row in range(part[0], part[1]):
        visible = min(reach(places, row) // 4, out.shape[1])
        score_row(kind, keys, q[row], places.row_req[row], out[row, :visible])
        out[row, visible:] = -np.inf


def score(
    q: torch.Tensor, cache: KeyCache, where: Where, *, pool: RowPool = SERIAL
) -> torch.Tensor:
    """float32 `[rows, blocks of the longest request]`; -inf past a row's complete visible blocks."""
    query = prepare(q, cache, where)
    longest = int(where.seq_len.max()) if where.seq_len.numel() else 0
    out = torch.empty(q.shape[0], max(0, longest) // BLOCK, dtype=torch.float32)
    pool.run(
        lambda lo, hi: _score(query.kind, query.keys, query.places, query.q, out.numpy(), (lo, hi)),
        q.shape[0],
    )
    return out


@dataclass(frozen=True)
class Norm:
    """What turns a pooled raw key into a compressed one."""

    weight: torch.Tensor
    rotary: Rotary
    eps: float = 1e-6


def compress(raw: torch.Tensor, first: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Compressed keys `[groups, d]` of raw keys `[groups, 4, d]` whose first tokens are at `first`."""
    if raw.ndim != 3 or raw.shape[1] != BLOCK or first.shape != raw.shape[:1]:
        raise BadShape(KERNEL, "raw", f"is {tuple(raw.shape)}; expected [{len(first)}, 4, d]")
    wide = raw.float()
    mean = (((wide[:, 0] + wide[:, 1]) + wide[:, 2]) + wide[:, 3]) * 0.25
    cos, sin = norm.rotary.at(first, raw.dtype)
    return rotate(rms_norm(mean.to(raw.dtype), norm.weight, norm.eps)[:, None], cos, sin)[:, 0]


def extend(
    raw: torch.Tensor, ring: torch.Tensor, cache: KeyCache, where: Where, *, norm: Norm
) -> int:
    """Take in the raw keys `[rows, d]` of a step. Returns how many groups became complete.

    Rows of a request ascend by position without gaps. `ring [R, n >= 4, d]` keeps each request's last
    raw keys (token t at t % n): the open group, and what a rollback may reopen. Complete groups are
    compressed into the cache. Rows of requests that do not exist, and blocks without a page, are dropped.
    """
    places = _check_ring(raw, ring, cache, where)
    groups = torch.empty(raw.shape[0], BLOCK, raw.shape[1], dtype=raw.dtype)
    owner = np.empty((raw.shape[0], 2), np.int64)
    bits = _BITS[raw.dtype][0]
    count = _roll(
        raw.detach().view(bits).numpy(),
        ring.detach().view(bits).numpy(),
        places,
        groups.view(bits).numpy(),
        owner,
    )
    if count:
        _keep(groups[:count], owner[:count], cache, norm)
    return count


def bind_extend(
    raw: torch.Tensor, ring: torch.Tensor, cache: KeyCache, where: Where, *, norm: Norm
) -> Callable[[int], None]:
    """`extend` over static buffers; a call takes the rows, and costs little in a step that completes no group."""
    places = _check_ring(raw, ring, cache, where)
    groups = torch.empty(raw.shape[0], BLOCK, raw.shape[1], dtype=raw.dtype)
    owner = np.empty((raw.shape[0], 2), np.int64)
    bits = _BITS[raw.dtype][0]
    keys, kept = raw.detach().view(bits).numpy(), ring.detach().view(bits).numpy()
    found = groups.view(bits).numpy()

    def run(rows: int) -> None:
        check_rows(KERNEL, rows, len(keys))
        count = _roll(keys[:rows], kept, places, found, owner)
        if count:
            _keep(groups[:count], owner[:count], cache, norm)

    return run


def _keep(groups: torch.Tensor, owner: Array, cache: KeyCache, norm: Norm) -> None:
    """Complete groups into the cache, where there is a page for them."""
    request, block = torch.from_numpy(owner).unbind(1)
    made = compress(groups, block * BLOCK, norm).to(cache.keys.dtype)
    page_size = cache.keys.shape[1]
    slot = block // page_size
    known = slot < cache.page_table.shape[1]
    page = cache.page_table[request, slot.clamp(max=cache.page_table.shape[1] - 1)].long()
    known &= (page >= 0) & (page < cache.keys.shape[0])
    cache.keys.detach()[page[known], (block % page_size)[known]] = made[known]


def _check_ring(raw: torch.Tensor, ring: torch.Tensor, cache: KeyCache, where: Where) -> Places:
    """The positions of the rows, once everything fits together."""
    if raw.dtype not in KEY_DTYPES or ring.dtype != raw.dtype:
        raise BadDtype(
            KERNEL, "raw", f"is {raw.dtype}, ring {ring.dtype}; expected one of {KEY_DTYPES}"
        )
    if not raw.is_contiguous() or not ring.is_contiguous():
        raise BadLayout(KERNEL, "raw", "or ring is not contiguous")
    if ring.ndim != 3 or ring.shape[1] < BLOCK or raw.ndim != 2 or ring.shape[2] != raw.shape[1]:
        raise BadShape(KERNEL, "ring", f"is {tuple(ring.shape)} for raw {tuple(raw.shape)}")
    if cache.page_table.ndim != 2 or ring.shape[0] != cache.page_table.shape[0]:
        raise BadShape(
            KERNEL, "page_table", f"is {tuple(cache.page_table.shape)}, ring {tuple(ring.shape)}"
        )
    if cache.page_table.shape[1] == 0:
        raise BadShape(KERNEL, "page_table", "has no columns")
    keys = cache.keys
    if keys.ndim != 3 or keys.shape[1] == 0 or keys.shape[2] != raw.shape[1]:
        raise BadShape(KERNEL, "keys", f"is {tuple(keys.shape)} for raw {tuple(raw.shape)}")
    if {raw.device.type, ring.device.type, keys.device.type} != {"cpu"}:
        raise BadLayout(KERNEL, "raw, ring, keys", "are not all on the CPU")
    apart(KERNEL, ("ring", "raw"), ring, raw)
    places = Places(
        *(contiguous(KERNEL, n, getattr(where, n), torch.int32) for n in Places._fields)
    )
    if places.row_req.shape != raw.shape[:1] or places.row_pos.shape != raw.shape[:1]:
        raise BadShape(KERNEL, "row_req", f"or row_pos is not for the {len(raw)} rows of raw")
    return places


@kernel
def _roll(raw: Array, ring: Array, places: Places, groups: Array, owner: Array) -> int:  # noqa: PLR0917
    """Raw keys into the ring, in order; each group that its fourth token completes is copied out."""
    count, length = 0, ring.shape[1]
    for row in range(raw.shape[0]):
        request, position = places.row_req[row], places.row_pos[row]
        if request < 0 or request >= ring.shape[0] or position < 0:
            continue
        ring[request, position % length] = raw[row]
        if position % 4 == 3:
            for t in range(4):
                groups[count, t] = ring[request, (position - 3 + t) % length]
            owner[count, 0], owner[count, 1] = request, position // 4
            count += 1
    return count
