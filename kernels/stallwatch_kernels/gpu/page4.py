"""page4 attention in Triton: a row at a time, and eight rows over the plan of their union.

The layout is `qsa.layout`'s, on the device; the plan is `qsa.plan`'s, made from host copies of the index tensors.
`precise` computes both products in float32; without it 16-bit queries and caches use the matrix unit's own type,
and the weights of the softmax are rounded to it (about 3e-4 in the result).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton.language as tl

from stallwatch_kernels.errors import BadDtype, BadLayout, BadMetadata, BadScale, BadShape
from stallwatch_kernels.gpu import interpreted
from stallwatch_kernels.gpu.scalar import cast, e4m3, jit, power_of_two, product, same_device
from stallwatch_kernels.qsa.layout import BLOCK, CACHE_DTYPES, QUERY_DTYPES, PagedKV, Rows
from stallwatch_kernels.qsa.plan import GROUP, Plan

KERNEL = "page4-triton"
_TILE = 32  # tokens


def attend(
    q: torch.Tensor, kv: PagedKV, rows: Rows, *, made: Plan | None = None, precise: bool = True
) -> torch.Tensor:
    """softmax(q k / sqrt(D)) v over each row's tokens, `[rows, Hq, D]` in q's type; zeros where a row reads none.

    With a plan its full groups run grouped and the rows left over ungrouped. Raises KernelRefused.
    """
    _check(q, kv, rows, precise)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    begin = 0
    if made is not None and made.groups:
        if made.groups > len(rows) // GROUP:
            raise BadMetadata(KERNEL, "plan", f"has {made.groups} groups for {len(rows)} rows")
        _launch_groups(q, kv, rows, out, made, precise)
        begin = made.groups * GROUP
    if len(rows) > begin:
        _launch_rows(q, kv, rows, out, begin, precise)
    return out


def _launch_rows(  # noqa: PLR0917
    q: torch.Tensor, kv: PagedKV, rows: Rows, out: torch.Tensor, begin: int, precise: bool
) -> None:
    grid = (len(rows) - begin, kv.k.shape[2])
    attend_row[grid](
        *_shared(q, kv, rows, out),
        rows.seq_len,
        rows.seq_len.shape[0],
        kv.k.shape[0],
        rows.row_req,
        rows.row_pos,
        rows.indices,
        rows.counts,
        rows.indices.shape[1],
        begin,
        **_constants(q, kv, precise),
        GP=power_of_two(q.shape[1] // kv.k.shape[2]),
    )


def _launch_groups(  # noqa: PLR0917
    q: torch.Tensor, kv: PagedKV, rows: Rows, out: torch.Tensor, made: Plan, precise: bool
) -> None:
    def there(array: Any) -> torch.Tensor:
        return torch.from_numpy(array).to(q.device)

    attend_group[(made.groups, kv.k.shape[2])](
        *_shared(q, kv, rows, out),
        there(made.starts),
        there(made.lengths),
        there(made.keys),
        there(made.masks.view("int32")),
        **_constants(q, kv, precise),
        GP=power_of_two(q.shape[1] // kv.k.shape[2], 2),
        ROWS=GROUP,
    )


def _shared(q: torch.Tensor, kv: PagedKV, rows: Rows, out: torch.Tensor) -> tuple[Any, ...]:
    """The arguments of both kernels, in their order."""
    coded = kv.k.dtype == torch.float8_e4m3fn
    k, v = (c.view(torch.uint8) if coded else c for c in (kv.k, kv.v))
    size = q.shape[2]
    return (
        *(q, q.stride(0), q.stride(1), out, out.stride(0), out.stride(1)),
        *(k, *k.stride()[:3], v, *v.stride()[:3]),
        *(rows.page_table, rows.page_table.shape[1], kv.k.shape[1]),
        size**-0.5 * kv.k_scale * math.log2(math.e),
        kv.v_scale,
    )


def _constants(q: torch.Tensor, kv: PagedKV, precise: bool) -> dict[str, Any]:
    size = q.shape[2]
    return {
        "G": q.shape[1] // kv.k.shape[2],
        "D": size,
        "DP": power_of_two(size),
        "N": _TILE,
        "E4M3": kv.k.dtype == torch.float8_e4m3fn,
        "PRECISE": precise,
    }


@jit
def _fetch(  # noqa: PLR0913, PLR0917
    base: tl.tensor,
    page: tl.tensor,
    inside: tl.tensor,
    page_step: tl.tensor,
    token_step: tl.tensor,
    columns: tl.tensor,
    live: tl.tensor,
    D: tl.tensor,  # noqa: N803
    E4M3: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """Tokens of a tile, float32 or 16-bit `[N, DP]`; what is not live is zero and not read."""
    at = page.to(tl.int64) * page_step + inside.to(tl.int64) * token_step
    there = live[:, None] & (columns < D)[None, :]
    if E4M3:
        return e4m3(tl.load(base + at[:, None] + columns[None, :], mask=there, other=0))
    else:  # noqa: RET505
        return tl.load(base + at[:, None] + columns[None, :], mask=there, other=0.0)


@jit
def _narrow(
    x: tl.tensor,
    like: tl.tensor,
    PRECISE: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """An operand beside `like`: in its type, unless the product is to be float32."""
    if PRECISE:
        return x.to(tl.float32)
    else:  # noqa: RET505
        return x.to(like.dtype)


@jit
def _absorb(  # noqa: PLR0913, PLR0917
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    seen: tl.tensor,
    scale: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    PRECISE: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """One step of the running softmax: rows `[M]` over the tile's tokens `[N]`, where `seen [M, N]`."""
    scores = product(q, tl.trans(_narrow(k, q, PRECISE)), PRECISE) * scale
    scores = tl.where(seen, scores, float("-inf"))
    highest = tl.maximum(top, tl.max(scores, 1))
    # A row that has seen nothing yet has no finite top; any finite one keeps NaN away.
    safe = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - safe[:, None])
    fade = tl.exp2(top - safe)
    total = total * fade + tl.sum(weights, 1)
    acc = acc * fade[:, None] + product(
        _narrow(weights, q, PRECISE), _narrow(v, q, PRECISE), PRECISE
    )
    return highest, total, acc


@jit
def attend_row(  # noqa: PLR0913, PLR0917
    q: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    out: tl.tensor,
    out_row: tl.tensor,
    out_head: tl.tensor,
    k: tl.tensor,
    k_page: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    v: tl.tensor,
    v_page: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    page_table: tl.tensor,
    max_pages: tl.tensor,
    page_size: tl.tensor,
    scale: tl.tensor,
    value_scale: tl.tensor,
    seq_len: tl.tensor,
    requests: tl.tensor,
    pages: tl.tensor,
    row_req: tl.tensor,
    row_pos: tl.tensor,
    indices: tl.tensor,
    counts: tl.tensor,
    width: tl.tensor,
    begin: tl.tensor,
    G: tl.constexpr,  # noqa: N803
    D: tl.constexpr,  # noqa: N803
    DP: tl.constexpr,  # noqa: N803
    N: tl.constexpr,  # noqa: N803
    E4M3: tl.constexpr,  # noqa: N803
    PRECISE: tl.constexpr,  # noqa: N803
    GP: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """One row and one KV head."""
    row, head = begin + tl.program_id(0), tl.program_id(1)
    heads, columns, lane = tl.arange(0, GP), tl.arange(0, DP), tl.arange(0, N)
    mine = (heads < G)[:, None] & (columns < D)[None, :]
    place = (head * G + heads)[:, None]
    queries = tl.load(q + row * q_row + place * q_head + columns[None, :], mask=mine, other=0.0)
    request = tl.load(row_req + row)
    known = (request >= 0) & (request < requests)
    request = tl.where(known, request, 0)
    limit = tl.minimum(tl.load(seq_len + request, mask=known, other=0), tl.load(row_pos + row) + 1)
    limit = tl.where(known, limit, 0)
    count = tl.minimum(tl.load(counts + row), width)
    top = tl.full([GP], float("-inf"), tl.float32)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, DP], tl.float32)
    for start in range(0, count, N):
        listed = start + lane < count
        token = tl.load(indices + row * width + start + lane, mask=listed, other=-1)
        live = (token >= 0) & (token < limit) & (token < max_pages * page_size)
        token = tl.where(live, token, 0)
        page = tl.load(page_table + request * max_pages + token // page_size, mask=live, other=-1)
        live = live & (page >= 0) & (page < pages)
        page, inside = tl.where(live, page, 0), token % page_size
        key = _fetch(k + head * k_head, page, inside, k_page, k_token, columns, live, D, E4M3)
        value = _fetch(v + head * v_head, page, inside, v_page, v_token, columns, live, D, E4M3)
        seen = live[None, :] & (heads >= 0)[:, None]
        top, total, acc = _absorb(queries, key, value, seen, scale, top, total, acc, PRECISE)
    result = tl.where(total > 0, value_scale / tl.where(total > 0, total, 1.0), 0.0)[:, None] * acc
    target = out + row * out_row + place * out_head + columns[None, :]
    tl.store(target, cast(result, out), mask=mine)


@jit
def attend_group(  # noqa: PLR0913, PLR0917
    q: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    out: tl.tensor,
    out_row: tl.tensor,
    out_head: tl.tensor,
    k: tl.tensor,
    k_page: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    v: tl.tensor,
    v_page: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    page_table: tl.tensor,
    max_pages: tl.tensor,
    page_size: tl.tensor,
    scale: tl.tensor,
    value_scale: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    keys: tl.tensor,
    masks: tl.tensor,
    G: tl.constexpr,  # noqa: N803
    D: tl.constexpr,  # noqa: N803
    DP: tl.constexpr,  # noqa: N803
    N: tl.constexpr,  # noqa: N803
    E4M3: tl.constexpr,  # noqa: N803
    PRECISE: tl.constexpr,  # noqa: N803
    GP: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """Eight rows and one KV head: every microblock of their union is read once."""
    group, head = tl.program_id(0), tl.program_id(1)
    lines, columns, lane = tl.arange(0, ROWS * GP), tl.arange(0, DP), tl.arange(0, N)
    member, line = lines // GP, lines % GP
    mine = (line < G)[:, None] & (columns < D)[None, :]
    row, place = (group * ROWS + member)[:, None], (head * G + line)[:, None]
    queries = tl.load(q + row * q_row + place * q_head + columns[None, :], mask=mine, other=0.0)
    first, length = tl.load(starts + group), tl.load(lengths + group).to(tl.int32)
    top = tl.full([ROWS * GP], float("-inf"), tl.float32)
    total = tl.zeros([ROWS * GP], tl.float32)
    acc = tl.zeros([ROWS * GP, DP], tl.float32)
    for start in range(0, length, N // 4):
        entry, offset = start + lane // 4, lane % 4
        planned = entry < length
        key = tl.load(keys + first + entry, mask=planned, other=0)
        bits = tl.load(masks + first + entry, mask=planned, other=0)
        # A token that no row may read can be stale memory: it is not read at all.
        any_row = bits | (bits >> 16)
        any_row = any_row | (any_row >> 8)
        any_row = any_row | (any_row >> 4)
        live = planned & (((any_row >> offset) & 1) != 0)
        request = (key >> 32).to(tl.int32)
        token = (key & 0xFFFFFFFF).to(tl.int32) * 4 + offset
        token = tl.where(live, token, 0)
        page = tl.load(page_table + request * max_pages + token // page_size, mask=live, other=0)
        inside = token % page_size
        found = _fetch(k + head * k_head, page, inside, k_page, k_token, columns, live, D, E4M3)
        value = _fetch(v + head * v_head, page, inside, v_page, v_token, columns, live, D, E4M3)
        admitted = (bits[None, :] >> (member[:, None] * 4 + offset[None, :])) & 1
        seen = live[None, :] & (admitted != 0)
        top, total, acc = _absorb(queries, found, value, seen, scale, top, total, acc, PRECISE)
    result = tl.where(total > 0, value_scale / tl.where(total > 0, total, 1.0), 0.0)[:, None] * acc
    target = out + row * out_row + place * out_head + columns[None, :]
    tl.store(target, cast(result, out), mask=mine)


def _check(q: torch.Tensor, kv: PagedKV, rows: Rows, precise: bool) -> None:
    """Raise the named error of the first argument that contradicts the layout."""
    k, v = kv.k, kv.v
    index = {name: getattr(rows, name) for name in Rows.__dataclass_fields__}
    same_device(KERNEL, {"q": q, "k": k, "v": v, **index})
    if q.dtype not in QUERY_DTYPES or k.dtype not in CACHE_DTYPES:
        raise BadDtype(KERNEL, "q, k", f"are {q.dtype} and {k.dtype}")
    if k.shape != v.shape or k.dtype != v.dtype or k.ndim != 4 or 0 in k.shape[1:]:
        raise BadShape(KERNEL, "k, v", f"are {tuple(k.shape)} and {tuple(v.shape)}")
    if q.ndim != 3 or q.shape[::2] != (len(rows), k.shape[3]) or q.shape[1] % k.shape[2]:
        raise BadShape(KERNEL, "q", f"is {tuple(q.shape)} for {len(rows)} rows, k {tuple(k.shape)}")
    if q.stride(2) != 1 or k.stride(3) != 1 or v.stride(3) != 1:
        raise BadLayout(KERNEL, "q, k, v", "must be contiguous over D")
    for name, tensor in index.items():
        if tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise BadDtype(KERNEL, name, f"is {tensor.dtype}; expected contiguous int32")
    if k.shape[1] % BLOCK:
        raise BadMetadata(KERNEL, "page", f"is {k.shape[1]} tokens; expected a multiple of 4")
    if not all(math.isfinite(s) and s > 0 for s in (kv.k_scale, kv.v_scale)):
        raise BadScale(KERNEL, "scales", f"are {kv.k_scale}, {kv.v_scale}")
    if not precise and q.dtype == torch.float32:
        raise BadDtype(KERNEL, "q", "is float32, which has no product of less precision here")
    if not precise and q.dtype == torch.bfloat16 and interpreted():
        raise BadDtype(
            KERNEL, "q", "is bfloat16, whose own products Triton's interpreter gets wrong"
        )
