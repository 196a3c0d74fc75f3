"""Sparse attention in torch: attention over all tokens of a request under the mask of what was selected."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from stallwatch_engine.checkpoint.config import ModelConfig
from stallwatch_engine.checkpoint.weights import QsaWeights
from stallwatch_engine.model.plain.step import Span, Step
from stallwatch_engine.state.stores import QsaStore
from stallwatch_kernels.norm.reference import rms_norm
from stallwatch_kernels.qsa.rotary import Rotary, rotate

_E4M3_MAX = 448.0


class PlainQsa:
    """One layer. `table` int32[slots, max_pages] is that of all requests."""

    def __init__(
        self,
        config: ModelConfig,
        weights: QsaWeights,
        store: QsaStore,
        *,
        table: torch.Tensor,
        rotary: Rotary,
    ) -> None:
        self._config, self._weights, self._store = config, weights, store
        self._table = table
        self._cos, self._sin = rotary.cos.to(table.device), rotary.sin.to(table.device)
        self._page = store.k.shape[1]

    def __call__(self, step: Step, x: torch.Tensor) -> torch.Tensor:
        """[T, H] from x [T, H]; the caches grow."""
        qsa, weights = self._config.qsa, self._weights
        size, dtype = qsa.head_dim, x.dtype
        q, gate = linear(x, weights.q).unflatten(1, (-1, 2 * size)).chunk(2, -1)
        k, v = (linear(x, w).unflatten(1, (-1, size)) for w in (weights.k, weights.v))
        found = linear(x, weights.index_qk).unflatten(1, (-1, qsa.index_dim))
        index_q, raw = found[:, :-1], found[:, -1]
        q = self._turned(self._norm(q, weights.q_norm), step.positions)
        k = self._turned(self._norm(k, weights.k_norm), step.positions)
        index_q = self._turned(self._norm(index_q, weights.index_q_norm), step.positions)
        out = torch.zeros_like(q)
        for span in step.spans:
            rows = slice(span.lo, span.hi)
            pages = self._table[span.slot, : -(-span.length // self._page)].long()
            self._keep(span, pages, k[rows], v[rows])
            self._compress(span, pages, raw[rows])
            seen = self._select(span, pages, index_q[rows], step.positions[rows])
            out[rows] = self._attend(span, pages, q[rows], seen).to(dtype)
        return linear(out.flatten(1) * torch.sigmoid(gate.flatten(1)), weights.out)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, self._config.eps)

    def _turned(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return rotate(x, self._cos[positions].to(x.dtype), self._sin[positions].to(x.dtype))

    def _keep(self, span: Span, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        where = torch.arange(span.first, span.length, device=pages.device)
        page, inside = pages[where // self._page], where % self._page
        for rows, cache in ((k, self._store.k), (v, self._store.v)):
            new = rows.float().clamp(-_E4M3_MAX, _E4M3_MAX) if cache.element_size() == 1 else rows
            # as bytes: E4M3 is not indexed everywhere
            bits = new.to(cache.dtype).contiguous().view(torch.uint8)
            cache.view(torch.uint8)[page, inside] = bits

    def _compress(self, span: Span, pages: torch.Tensor, raw: torch.Tensor) -> None:
        """Complete groups into the index cache, the open one into the ring."""
        ratio, ring = self._config.qsa.ratio, self._store.ring[span.slot]
        held = span.first % ratio
        keys = torch.cat([ring[:held], raw])
        whole = len(keys) // ratio
        if whole:
            groups = keys[: whole * ratio].unflatten(0, (whole, ratio))
            pooled = self._norm(groups.float().mean(1).to(raw.dtype), self._weights.index_k_norm)
            block = torch.arange(whole, device=pages.device) + span.first // ratio
            turned = self._turned(pooled[:, None], block * ratio)[:, 0]
            size = self._page // ratio
            self._store.index[pages[block // size], block % size] = turned
        left = keys[whole * ratio :]
        ring[: len(left)] = left

    def _select(
        self, span: Span, pages: torch.Tensor, q: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """bool[t, length]: best blocks by score, lower block first among equals, and the causal tail."""
        qsa, length = self._config.qsa, span.length
        blocks = length // qsa.ratio
        tokens = torch.arange(length, device=pages.device)
        visible = (positions + 1) // qsa.ratio
        seen = (tokens >= visible[:, None] * qsa.ratio) & (tokens <= positions[:, None])
        if not blocks:
            return seen
        keys = self._store.index[pages].flatten(0, 1)[:blocks].float()
        scores = torch.relu(torch.einsum("thd,bd->thb", q.float(), keys)).sum(1)
        scores /= math.sqrt(qsa.index_dim)
        hidden = torch.arange(blocks, device=pages.device) >= visible[:, None]
        order = scores.masked_fill(hidden, -1.0).sort(dim=-1, descending=True, stable=True)
        best = order.indices[:, : qsa.blocks]
        chosen = torch.zeros_like(hidden).scatter(1, best, value=True) & ~hidden
        whole = blocks * qsa.ratio
        seen[:, :whole] |= chosen.repeat_interleave(qsa.ratio, 1)
        return seen

    def _attend(
        self, span: Span, pages: torch.Tensor, q: torch.Tensor, seen: torch.Tensor
    ) -> torch.Tensor:
        k, v = (
            cache.view(torch.uint8)[pages]
            .view(cache.dtype)
            .flatten(0, 1)[: span.length]
            .float()
            .transpose(0, 1)
            for cache in (self._store.k, self._store.v)
        )
        queries = q.float().transpose(0, 1)
        out = scaled_dot_product_attention(
            queries[None], k[None], v[None], attn_mask=seen, enable_gqa=True
        )
        return out[0].transpose(0, 1)
