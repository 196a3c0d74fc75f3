"""What a page4 call is made of, and what it refuses before any memory is touched.

A cache of keys and values in pages, and the rows that read it: which request each row belongs to, where
it stands, and which tokens were selected for it. Values inside index tensors are data, not arguments:
an index that points nowhere contributes nothing, and is never an error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from stallwatch_kernels.errors import BadDtype, BadLayout, BadMetadata, BadScale, BadShape
from stallwatch_kernels.tensors import Array, contiguous

KERNEL = "page4"
BLOCK = 4
CACHE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
QUERY_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class PagedKV:
    """k, v `[pages, page, Hkv, D]` with any stride over pages, tokens and heads; D is contiguous.

    E4M3 caches mean code * scale; other types have scales too, 1 as a rule.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0


@dataclass(frozen=True)
class Rows:
    """`page_table int32[R, max_pages]`, `row_req, row_pos int32[rows]`, `seq_len int32[R]`,
    `indices int32[rows, width]` (logical tokens, ascending and distinct, -1 padded), `counts int32[rows]`.

    A row reads the listed tokens that are older than `min(seq_len, row_pos + 1)`: what lies beyond is
    stale, or not yet written.
    """

    page_table: torch.Tensor
    row_req: torch.Tensor
    row_pos: torch.Tensor
    seq_len: torch.Tensor
    indices: torch.Tensor
    counts: torch.Tensor

    def __len__(self) -> int:
        return int(self.row_req.shape[0])


class Cache(NamedTuple):
    """One of k, v for compiled code: a byte address and strides in bytes."""

    at: int
    page: int
    token: int
    head: int


class Store(NamedTuple):
    """Both caches for compiled code; `pages` bounds page numbers, `size` is tokens per page."""

    k: Cache
    v: Cache
    pages: int
    size: int
    heads: int


class Selection(NamedTuple):
    """`Rows` as arrays."""

    page_table: Array
    row_req: Array
    row_pos: Array
    seq_len: Array
    indices: Array
    counts: Array


def check(q: torch.Tensor, kv: PagedKV, rows: Rows) -> None:
    """Raise the named error of the first argument that contradicts the layout. Touches no data."""
    _check_cache(kv)
    _check_rows(rows)
    heads, size = kv.k.shape[2], kv.k.shape[3]
    if q.dtype not in QUERY_DTYPES:
        raise BadDtype(KERNEL, "q", f"is {q.dtype}; expected float32, float16 or bfloat16")
    if q.ndim != 3 or q.shape[0] != len(rows) or q.shape[2] != size:
        raise BadShape(
            KERNEL, "q", f"is {tuple(q.shape)}; expected [{len(rows)}, query heads, {size}]"
        )
    if q.shape[1] == 0 or q.shape[1] % heads:
        raise BadShape(KERNEL, "q", f"has {q.shape[1]} heads, no multiple of the cache's {heads}")
    if q.device.type != "cpu":
        raise BadLayout(KERNEL, "q", f"is on {q.device}, and this path runs on the CPU")


def _check_cache(kv: PagedKV) -> None:
    for name, cache in (("k", kv.k), ("v", kv.v)):
        if cache.dtype not in CACHE_DTYPES:
            raise BadDtype(
                KERNEL,
                name,
                f"is {cache.dtype}; expected float32, float16, bfloat16, float8_e4m3fn",
            )
        if cache.ndim != 4 or 0 in cache.shape[1:]:
            raise BadShape(KERNEL, name, f"is {tuple(cache.shape)}; expected [pages, page, Hkv, D]")
        if cache.device.type != "cpu":
            raise BadLayout(KERNEL, name, f"is on {cache.device}, and this path runs on the CPU")
        if cache.stride(3) != 1:
            raise BadLayout(KERNEL, name, f"has stride {cache.stride(3)} over D; expected 1")
    if kv.k.shape != kv.v.shape or kv.k.dtype != kv.v.dtype:
        raise BadShape(
            KERNEL, "v", f"is {tuple(kv.v.shape)} {kv.v.dtype}, k {tuple(kv.k.shape)} {kv.k.dtype}"
        )
    if kv.k.shape[1] % BLOCK:
        raise BadMetadata(KERNEL, "page", f"is {kv.k.shape[1]} tokens; expected a multiple of 4")
    for name, scale in (("k_scale", kv.k_scale), ("v_scale", kv.v_scale)):
        if not math.isfinite(scale) or scale <= 0:
            raise BadScale(KERNEL, name, f"is {scale}; expected a positive finite number")


def _check_rows(rows: Rows) -> None:
    shapes = {
        "page_table": (rows.page_table, 2),
        "row_req": (rows.row_req, 1),
        "row_pos": (rows.row_pos, 1),
        "seq_len": (rows.seq_len, 1),
        "indices": (rows.indices, 2),
        "counts": (rows.counts, 1),
    }
    for name, (tensor, axes) in shapes.items():
        contiguous(KERNEL, name, tensor, torch.int32)
        if tensor.ndim != axes:
            raise BadShape(KERNEL, name, f"has {tensor.ndim} axes; expected {axes}")
    count = len(rows)
    for name in ("row_pos", "indices", "counts"):
        if shapes[name][0].shape[0] != count:
            raise BadShape(KERNEL, name, f"has {shapes[name][0].shape[0]} rows, row_req {count}")
    if rows.seq_len.shape[0] != rows.page_table.shape[0]:
        raise BadShape(
            KERNEL,
            "seq_len",
            f"is for {rows.seq_len.shape[0]} requests, page_table for {rows.page_table.shape[0]}",
        )


def store(kv: PagedKV) -> Store:
    """Addresses of the caches. They are valid while the tensors live."""
    caches = []
    for tensor in (kv.k, kv.v):
        page, token, head = (s * tensor.element_size() for s in tensor.stride()[:3])
        caches.append(Cache(tensor.data_ptr(), page, token, head))
    return Store(caches[0], caches[1], *(int(n) for n in kv.k.shape[:3]))


def selection(rows: Rows) -> Selection:
    """The index tensors as arrays over the same memory."""
    return Selection(
        *(contiguous(KERNEL, name, getattr(rows, name), torch.int32) for name in Selection._fields)
    )
