"""Sparse attention: one merged projection, norms and positions, caches, selection, attention, output gate.

Requests are named by their slots, so the page tables of all slots are the kernels' page table.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from stallwatch_engine.checkpoint.config import ModelConfig
from stallwatch_engine.checkpoint.weights import QsaWeights
from stallwatch_engine.model.buffers import Activations, Run, StepBuffers
from stallwatch_engine.state.stores import QsaStore, StateStores
from stallwatch_kernels.linear.skinny import Linear
from stallwatch_kernels.pool import RowPool
from stallwatch_kernels.qsa import indexer, page4
from stallwatch_kernels.qsa.layout import PagedKV, Rows
from stallwatch_kernels.qsa.project import (
    Heads,
    Places,
    Project,
    Projected,
    bind_gate,
    bind_scatter,
)
from stallwatch_kernels.qsa.rotary import Rotary
from stallwatch_kernels.qsa.select import bind_select

_E4M3_MAX = 448.0


class QsaScratch:
    """Buffers between the kernels, shared by all layers, and the table of angles."""

    def __init__(self, config: ModelConfig, tokens: int, dtype: torch.dtype) -> None:
        qsa = config.qsa
        self.heads = Heads(
            qsa.query_heads, qsa.kv_heads, qsa.head_dim, qsa.index_heads, qsa.index_dim
        )
        self.rotary = Rotary(qsa.rotary_dim, qsa.rope_theta, config.max_position)
        self.merged = torch.zeros(tokens, self.heads.width, dtype=dtype)
        self.parts = Projected.empty(self.heads, tokens, dtype)
        self.gated = torch.zeros(tokens, qsa.query_heads * qsa.head_dim, dtype=dtype)
        self.indices = torch.full((tokens, qsa.selected), -1, dtype=torch.int32)
        self.counts = torch.zeros(tokens, dtype=torch.int32)


def bind_qsa(  # noqa: PLR0917
    config: ModelConfig,
    weights: QsaWeights,
    store: QsaStore,
    inputs: StepBuffers,
    act: Activations,
    scratch: QsaScratch,
    *,
    stores: StateStores,
    pool: RowPool,
) -> Run:
    """Sets y = attention(x) over what the indexer selects."""
    parts, heads = scratch.parts, scratch.heads
    table = stores.tables.entries[:-1]  # the last row is that of slot NULL
    merged = torch.cat([weights.q, weights.k, weights.v, weights.index_qk])
    project = Linear(merged, pool=pool).bind(act.x, scratch.merged)
    norms = weights.q_norm, weights.k_norm, weights.index_q_norm
    prepare = Project(heads, norms, scratch.rotary, config.eps).bind(
        scratch.merged, inputs.positions, parts
    )
    places = Places(table, inputs.owner, inputs.positions)
    keep = [
        _bind_keep(rows, cache, places) for rows, cache in ((parts.k, store.k), (parts.v, store.v))
    ]
    extend = _bind_extend(config, weights, store, inputs, scratch, table)
    cache = indexer.KeyCache(store.index, table)
    where = indexer.Where(inputs.owner, inputs.positions, inputs.seq_lens)
    select = bind_select(parts.index_q, cache, where, scratch.indices, scratch.counts)
    rows = Rows(
        table,
        inputs.owner,
        inputs.positions,
        inputs.seq_lens,
        scratch.indices,
        scratch.counts,
    )
    attention = page4.prepare(parts.q, PagedKV(store.k, store.v), rows)
    gate = bind_gate(attention.out, scratch.merged, scratch.gated, heads)
    project_out = Linear(weights.out, pool=pool).bind(scratch.gated, act.y)

    def run(tokens: int, _requests: int) -> None:
        project(tokens)
        prepare(tokens)
        for each in keep:
            each(tokens)
        extend(tokens)
        select(tokens)
        # One row at a time: a row's bits then depend on nothing but its own request.
        pool.run(attention.ungrouped, tokens)
        gate(tokens)
        project_out(tokens)

    return run


def _bind_keep(rows: torch.Tensor, cache: torch.Tensor, places: Places) -> Callable[[int], None]:
    """Rows into the cache, rounded to its type first."""
    if cache.dtype == rows.dtype:
        return bind_scatter(rows, cache, places)
    rounded = rows.to(cache.dtype)
    scatter = bind_scatter(rounded, cache, places)
    e4m3 = cache.dtype == torch.float8_e4m3fn

    def run(count: int) -> None:
        # E4M3 has no infinity: what is beyond its range would become NaN
        new = rows[:count].clamp(-_E4M3_MAX, _E4M3_MAX) if e4m3 else rows[:count]
        rounded[:count] = new
        scatter(count)

    return run


def _bind_extend(  # noqa: PLR0917
    config: ModelConfig,
    weights: QsaWeights,
    store: QsaStore,
    inputs: StepBuffers,
    scratch: QsaScratch,
    table: torch.Tensor,
) -> Callable[[int], None]:
    """The indexer's raw keys into the open groups, complete groups into its cache."""
    norm = indexer.Norm(weights.index_k_norm, scratch.rotary, config.eps)
    cache = indexer.KeyCache(store.index, table)
    where = indexer.Where(inputs.owner, inputs.positions, inputs.seq_lens)
    return indexer.bind_extend(scratch.parts.raw, store.ring, cache, where, norm=norm)
