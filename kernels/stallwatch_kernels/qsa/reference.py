"""page4 in plain torch: what the fast paths are held against, and the path for shapes they do not take."""

from __future__ import annotations

import torch
from torch.nn import functional

from stallwatch_kernels.qsa.layout import PagedKV, Rows, check


def tokens_of(kv: PagedKV, rows: Rows, row: int) -> torch.Tensor:
    """Slots (page * page size + offset) that the row reads, in the order listed; int64."""
    request = int(rows.row_req[row])
    empty = torch.empty(0, dtype=torch.int64)
    if not 0 <= request < rows.page_table.shape[0]:
        return empty
    pages, size = kv.k.shape[:2]
    limit = min(int(rows.seq_len[request]), int(rows.row_pos[row]) + 1)
    limit = min(limit, rows.page_table.shape[1] * size)
    listed = rows.indices[row, : max(0, int(rows.counts[row]))].long()
    listed = listed[(listed >= 0) & (listed < limit)]
    page = rows.page_table[request, listed // size].long()
    there = (page >= 0) & (page < pages)
    return (page * size + listed % size)[there]


def attend(
    q: torch.Tensor, kv: PagedKV, rows: Rows, *, precision: torch.dtype = torch.float64
) -> torch.Tensor:
    """softmax(q k / sqrt(D)) v over each row's tokens, `[rows, Hq, D]` in `precision`; zeros where a row
    reads nothing.
    """
    check(q, kv, rows)
    count, heads, size = q.shape
    group = heads // kv.k.shape[2]
    out = torch.zeros(count, heads, size, dtype=precision)
    for row in range(count):
        slots = tokens_of(kv, rows, row)
        if not len(slots):
            continue
        page, inside = slots // kv.k.shape[1], slots % kv.k.shape[1]
        k = kv.k[page, inside].to(precision).repeat_interleave(group, 1) * kv.k_scale
        v = kv.v[page, inside].to(precision).repeat_interleave(group, 1) * kv.v_scale
        scores = torch.einsum("hd,thd->ht", q[row].to(precision), k) * size**-0.5
        out[row] = torch.einsum("ht,thd->hd", torch.softmax(scores, -1), v)
    return out


def dense(q: torch.Tensor, kv: PagedKV, rows: Rows, request: int = 0) -> torch.Tensor:
    """The same by torch's attention over ALL tokens of one request under a mask; every row is of that
    request. float32 `[rows, Hq, D]`; NaN where a row reads nothing.
    """
    return dense_attend(*dense_operands(q, kv, rows, request))


def dense_operands(
    q: torch.Tensor, kv: PagedKV, rows: Rows, request: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, keys, values and mask of one request, unpaged, float32, as torch's attention takes them."""
    check(q, kv, rows)
    length, size = int(rows.seq_len[request]), kv.k.shape[1]
    pages = rows.page_table[request, : (length + size - 1) // size].long()

    def unpaged(cache: torch.Tensor, scale: float) -> torch.Tensor:
        return cache[pages].flatten(0, 1)[:length].float().transpose(0, 1)[None] * scale

    mask = torch.zeros(len(rows), length + 1, dtype=torch.bool)
    width = torch.arange(rows.indices.shape[1])
    listed = (rows.indices >= 0) & (width < rows.counts[:, None])
    listed &= rows.indices < torch.clamp(rows.row_pos[:, None] + 1, max=length)
    mask.scatter_(1, torch.where(listed, rows.indices, length).long(), value=True)
    query = q.float().transpose(0, 1)[None]
    keys, values = unpaged(kv.k, kv.k_scale), unpaged(kv.v, kv.v_scale)
    return query, keys, values, mask[None, None, :, :length]


def dense_attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Torch's attention on `dense_operands`: `[rows, Hq, D]`."""
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)
