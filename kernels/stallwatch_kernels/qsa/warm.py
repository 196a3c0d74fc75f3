"""What must run once before serving: every compiled signature of attention, indexer and selection."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch

from stallwatch_kernels import warmup
from stallwatch_kernels.qsa import indexer, page4, select, synthetic
from stallwatch_kernels.qsa.indexer import KeyCache, Norm, Where
from stallwatch_kernels.qsa.layout import BLOCK
from stallwatch_kernels.qsa.page4 import Spec
from stallwatch_kernels.qsa.plan import GROUP
from stallwatch_kernels.qsa.rotary import Rotary
from stallwatch_kernels.qsa.synthetic import Mix


@dataclass(frozen=True)
class IndexerSpec:
    """An indexer: query heads, head size, type of its key cache."""

    heads: int
    size: int
    dtype: torch.dtype = torch.float32


@warmup.of(Spec)
def _page4(spec: Spec, _shapes: warmup.Shapes) -> Iterable[warmup.Task]:
    """One task per eligible implementation. Signatures depend on types alone: one group is enough."""
    impls: tuple[page4.Impl, ...] = ("grouped", "ungrouped")
    for impl in impls:
        if dict(page4.candidates(spec))[impl] is None:
            name = f"page4 {impl} {_word(spec.cache_dtype)}"
            yield warmup.Task(name, partial(_attend, spec, GROUP, impl))


def _attend(spec: Spec, rows: int, impl: page4.Impl) -> None:
    mix = Mix(rows, context=64, budget=16)
    kv = synthetic.caches((spec.kv_heads, spec.size, spec.page), mix, spec.cache_dtype)
    q = synthetic.queries(spec.q_heads, spec.size, mix, spec.q_dtype)
    page4.attend(q, kv, synthetic.rows(spec.page, mix), impl=impl)


@warmup.of(IndexerSpec)
def _indexer(spec: IndexerSpec, shapes: warmup.Shapes) -> Iterable[warmup.Task]:
    yield warmup.Task(
        f"indexer {_word(spec.dtype)}", lambda: _index(spec, min(max(shapes.rows), 16))
    )


def _index(spec: IndexerSpec, rows: int) -> None:
    """A few tokens through ring, compressed keys, scores and selection."""
    tokens = max(rows, 4 * BLOCK)
    zero = torch.zeros(tokens, dtype=torch.int32)
    where = Where(
        zero, torch.arange(tokens, dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
    )
    cache = KeyCache(
        torch.zeros(1, tokens, spec.size, dtype=spec.dtype), torch.zeros(1, 1, dtype=torch.int32)
    )
    norm = Norm(torch.zeros(spec.size), Rotary(spec.size, 1e4, tokens))
    raw = torch.ones(tokens, spec.size, dtype=spec.dtype)
    indexer.extend(raw, torch.zeros(1, BLOCK, spec.size, dtype=spec.dtype), cache, where, norm=norm)
    q = torch.ones(tokens, spec.heads, spec.size)
    indexer.score(q, cache, where)
    select.select(q, cache, where, budget=2 * BLOCK)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
