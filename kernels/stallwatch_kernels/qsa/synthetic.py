"""Calls of page4 on random data, with a given amount of sharing: what warm-up, calibration, tests and
bench run on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from stallwatch_kernels.qsa.layout import BLOCK, PagedKV, Rows

_SPARE_PAGES = 3


@dataclass(frozen=True)
class Mix:
    """Rows that read `budget` tokens in whole blocks, and their tail, out of `context`.

    `share` of each row's blocks is common to all rows of its request. Rows ascend by request.
    """

    rows: int
    context: int = 256
    budget: int = 64
    share: float = 0.75
    requests: int = 1
    seed: int = 0


def caches(spec: tuple[int, int, int], mix: Mix, dtype: torch.dtype = torch.float32) -> PagedKV:
    """Normal keys and values; `spec` is (KV heads, head size, tokens per page)."""
    heads, size, page = spec
    generator = torch.Generator().manual_seed(mix.seed)
    pages = mix.requests * _pages(mix, page) + _SPARE_PAGES
    k, v = (torch.randn(pages, page, heads, size, generator=generator).to(dtype) for _ in range(2))
    return PagedKV(k, v)


def rows(page: int, mix: Mix) -> Rows:
    """Selections for `caches` of the same mix, over shuffled pages."""
    generator = torch.Generator().manual_seed(mix.seed + 1)
    per_request = _pages(mix, page)
    table = torch.randperm(mix.requests * per_request + _SPARE_PAGES, generator=generator)
    request = torch.arange(mix.rows) * mix.requests // max(mix.rows, 1)
    position = mix.context - 1 - torch.arange(mix.rows) % BLOCK
    width = mix.budget + BLOCK - 1
    indices = torch.full((mix.rows, width), -1, dtype=torch.int32)
    counts = torch.zeros(mix.rows, dtype=torch.int32)
    for row in range(mix.rows):
        listed = _listed(mix, int(request[row]), int(position[row]), generator)
        indices[row, : len(listed)] = listed
        counts[row] = len(listed)
    return Rows(
        page_table=table[: mix.requests * per_request].view(mix.requests, per_request).int(),
        row_req=request.int(),
        row_pos=position.int(),
        seq_len=torch.full((mix.requests,), mix.context, dtype=torch.int32),
        indices=indices,
        counts=counts,
    )


def queries(heads: int, size: int, mix: Mix, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal queries `[rows, heads, size]`."""
    generator = torch.Generator().manual_seed(mix.seed + 2)
    return torch.randn(mix.rows, heads, size, generator=generator).to(dtype)


def moved(kv: PagedKV, rows_: Rows, seed: int) -> tuple[PagedKV, Rows]:
    """The same contents in other physical pages."""
    order = torch.randperm(kv.k.shape[0], generator=torch.Generator().manual_seed(seed))
    k, v = torch.empty_like(kv.k), torch.empty_like(kv.v)
    k[order], v[order] = kv.k, kv.v
    table = order[rows_.page_table.long()].int()
    return replace(kv, k=k, v=v), replace(rows_, page_table=table)


def _pages(mix: Mix, page: int) -> int:
    return (mix.context + page - 1) // page


def _listed(mix: Mix, request: int, position: int, generator: torch.Generator) -> torch.Tensor:
    """Tokens of one row, ascending, int32: common blocks, own blocks, tail."""
    visible = (position + 1) // BLOCK
    wanted = min(mix.budget // BLOCK, visible)
    fixed = torch.Generator().manual_seed(mix.seed * 1009 + request)
    certain = (mix.context - BLOCK) // BLOCK  # what every row of the request sees
    common = torch.randperm(certain, generator=fixed)[: int(wanted * mix.share)]
    taken = torch.zeros(visible, dtype=torch.bool)
    taken[common] = True
    rest = torch.randperm(visible, generator=generator)
    taken[rest[~taken[rest]][: wanted - len(common)]] = True
    blocks = taken.nonzero()[:, 0]
    tokens = (blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
    return torch.cat((tokens, torch.arange(visible * BLOCK, position + 1))).int()
