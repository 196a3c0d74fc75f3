"""Routed rows through their experts: out[t] = Σ_slot weight[t, slot] · w2 (silu(gate) ⊙ up).

One interface for float32, bfloat16 and NVFP4 weights. Sums are float32 in a fixed order, so that a token's
result has the same bits in any batch, in either layout and on either side of the gate; a bfloat16 result is
rounded once, at the end.

The gate is the number of routed rows, tokens * top_k: up to 80 the whole layer is one compiled call on
persistent buffers (`compact`); beyond, pass after pass over a pool of threads, tokens in chunks so that
buffers stay bounded (`grouped`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from stallwatch_kernels import gpu
from stallwatch_kernels.admission import Candidate, choose
from stallwatch_kernels.errors import BadDtype, BadLayout, BadMetadata, BadShape
from stallwatch_kernels.jit import kernel
from stallwatch_kernels.moe import passes
from stallwatch_kernels.moe.layout import (
    Groups,
    check_groups,
    checked_ids,
    expert_layout,
    no_expert,
    sort_by_expert,
)
from stallwatch_kernels.moe.route import route
from stallwatch_kernels.moe.weights import ExpertWeights
from stallwatch_kernels.pool import SERIAL, OneAtATime, RowPool
from stallwatch_kernels.tensors import Array, apart, check_rows
from stallwatch_kernels.warmup import Shapes, Task, of

OP = "moe-experts"
COMPACT_ROWS = 80
"""Most routed rows of the compact kernel."""

_CHUNK_ROWS = 8192  # routed rows whose intermediates are held at once
_LEAST = 16  # columns worth a thread


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """What decides the implementation of one call."""

    routed_rows: int
    threads: int = 1


def candidates(spec: ExpertsSpec) -> list[Candidate]:
    """By routed rows and threads, never by model. These weights lie in RAM: `gpu.routed` takes a device's."""
    refusal: str | None = None
    if spec.routed_rows > COMPACT_ROWS:
        refusal = f"takes at most {COMPACT_ROWS} routed rows"
    elif spec.threads > 1:
        refusal = "is one call on one thread"
    device = gpu.refusal() or "the weights lie in RAM"
    return [("compact", refusal), ("grouped", None), ("triton", device)]


class RoutedExperts:
    """The experts of one layer, bound. Holds its buffers: a call while another thread is in one raises Busy."""

    def __init__(self, weights: ExpertWeights, top_k: int, *, pool: RowPool = SERIAL) -> None:
        if not 1 <= top_k <= weights.experts:
            raise BadMetadata(OP, "top_k", f"is {top_k} of {weights.experts} experts")
        self.weights, self.top_k = weights, top_k
        self._pool = pool
        self._alone = OneAtATime(OP)
        self._w13, self._w2 = weights.w13.operands(), weights.w2.operands()
        self._f13, self._f2 = weights.w13.factors.numpy(), weights.w2.factors.numpy()
        self._few = choose(OP, candidates(ExpertsSpec(1, pool.threads)))
        self._many = choose(OP, candidates(ExpertsSpec(COMPACT_ROWS + 1, pool.threads)))
        self._compact = _Buffers.of(weights, COMPACT_ROWS)
        self._grouped = _Buffers.of(weights, 0)

    def __call__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Input x float32 or bfloat16 [T, H]; ids int32 and weights [T, top_k]. `out` [T, H] float32 or of x's type."""
        out = self._checked(x, ids, weights, out)
        flat = checked_ids(ids, self.weights.experts)
        wide, shares = _float32(x), _float32(weights)
        y = _float32_room(out)
        choice = self._few if flat.size <= COMPACT_ROWS else self._many
        with self._alone:
            if choice.impl == "compact" and flat.size:
                self._run_compact(wide.numpy(), flat, shares.numpy(), y.numpy())
            elif flat.size:
                self._run_chunks(wide, ids, shares, y)
        if y.dtype != out.dtype:
            out.detach().copy_(y)
        return out

    def bind(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
    ) -> Callable[[int], None]:
        """Bind to static float32 x, weights, out and int32 ids of the shapes above; a call takes the tokens.

        A call whose ids name no expert raises BadIndex, with `out` untouched.
        """
        self._checked(x, ids, weights, out)
        x, weights, out = x.detach(), weights.detach(), out.detach()
        checked_ids(ids[:0], self.weights.experts)
        if not x.dtype == weights.dtype == out.dtype == torch.float32:
            raise BadDtype(OP, "x, weights, out", "must be float32 to be bound")
        rows, flat, shares, y = x.numpy(), ids.numpy().reshape(-1), weights.numpy(), out.numpy()
        few = COMPACT_ROWS if self._few.impl == "compact" else 0
        top_k, most = self.top_k, len(x)

        def run(tokens: int) -> None:
            check_rows(OP, tokens, most)
            with self._alone:
                if 0 < tokens * top_k <= few:
                    self._run_compact(
                        rows[:tokens], flat[: tokens * top_k], shares[:tokens], y[:tokens]
                    )
                elif tokens:
                    self._run_chunks(x[:tokens], ids[:tokens], weights[:tokens], out[:tokens])

        return run

    def run(
        self,
        x: torch.Tensor,
        groups: Groups,
        weights: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The same for a layout made elsewhere, which is checked first."""
        out = self._checked(x, weights, weights, out)
        check_groups(groups, weights.numel(), self.weights.experts)
        y = _float32_room(out)
        with self._alone:
            if weights.numel():
                self._run_groups(_float32(x).numpy(), groups, _float32(weights).numpy(), y.numpy())
        if y.dtype != out.dtype:
            out.detach().copy_(y)
        return out

    def _run_compact(self, x: Array, flat: Array, shares: Array, out: Array) -> None:
        b = self._compact
        operands = (self._w13, self._w2, self._f13, self._f2)
        bad = _compact(x, flat, shares, operands, (b.h, b.y, b.order, b.experts, b.offsets), out)
        if bad >= 0:
            raise no_expert(flat, bad, self.weights.experts)

    def _run_chunks(
        self, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor, out: torch.Tensor
    ) -> None:
        step = max(1, _CHUNK_ROWS // self.top_k)
        if x.shape[0] > step:
            checked_ids(ids, self.weights.experts)  # all, before the first chunk writes
        for lo in range(0, x.shape[0], step):
            rows = slice(lo, lo + step)
            groups = expert_layout(ids[rows], self.weights.experts)
            self._run_groups(x[rows].numpy(), groups, shares[rows].numpy(), out[rows].numpy())

    def _run_groups(self, x: Array, groups: Groups, shares: Array, out: Array) -> None:
        rows = shares.size
        if rows > self._grouped.h.shape[0]:
            self._grouped = _Buffers.of(self.weights, rows)
        h, y = self._grouped.h[:rows], self._grouped.y[:rows]
        order, experts, offsets = groups.order, groups.experts, groups.offsets

        def first(lo: int, hi: int) -> None:
            passes.gate_up(x, self.top_k, order, experts, offsets, self._w13, self._f13, lo, hi, h)

        def second(lo: int, hi: int) -> None:
            passes.down(h, order, experts, offsets, self._w2, self._f2, lo, hi, y)
            passes.combine(y, shares, lo, hi, out)

        self._pool.run(first, self.weights.inner, least=_LEAST)
        self._pool.run(second, self.weights.hidden, least=_LEAST)

    def _checked(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor:
        hidden = self.weights.hidden
        if x.ndim != 2 or x.shape[1] != hidden:
            raise BadShape(OP, "x", f"is {tuple(x.shape)}; expected [T, {hidden}]")
        if x.dtype not in _FLOATS or weights.dtype not in _FLOATS:
            raise BadDtype(OP, "x", f"is {x.dtype}, weights {weights.dtype}; float32 or bfloat16")
        routed = (x.shape[0], self.top_k)
        if ids.shape != routed or weights.shape != routed:
            shapes = f"{tuple(ids.shape)} and {tuple(weights.shape)}"
            raise BadShape(OP, "ids, weights", f"are {shapes}; expected {routed}")
        if not (x.is_contiguous() and weights.is_contiguous() and x.device.type == "cpu"):
            raise BadLayout(OP, "x, weights", "are not contiguous on the CPU")
        if out is None:
            return torch.empty_like(x)
        if out.shape != x.shape or out.dtype not in {x.dtype, torch.float32}:
            raise BadShape(
                OP, "out", f"is {out.dtype}{tuple(out.shape)}; expected as x, or float32"
            )
        if not out.is_contiguous() or out.device.type != "cpu":
            raise BadLayout(OP, "out", "is not contiguous on the CPU")
        for name, read in (("x", x), ("ids", ids), ("weights", weights)):
            apart(OP, ("out", name), out, read)
        return out


_FLOATS = frozenset({torch.float32, torch.bfloat16})


@dataclass(slots=True)
class _Buffers:
    """Intermediates of a call: h [R, I], y [R, H], and room for a layout."""

    h: Array
    y: Array
    order: Array
    experts: Array
    offsets: Array

    @classmethod
    def of(cls, weights: ExpertWeights, rows: int) -> _Buffers:
        return cls(
            np.empty((rows, weights.inner), np.float32),
            np.empty((rows, weights.hidden), np.float32),
            np.empty(rows, np.int32),
            np.empty(rows, np.int32),
            np.empty(rows + 1, np.int32),
        )


def _float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().float()


def _float32_room(out: torch.Tensor) -> torch.Tensor:
    """`out` itself if it is float32, else room for what is rounded to it at the end."""
    return out.detach() if out.dtype == torch.float32 else torch.empty(out.shape)


Operands = tuple[tuple[int, ...], tuple[int, ...], Array, Array]


@kernel
def _compact(  # noqa: PLR0917
    x: Array,
    flat: Array,
    shares: Array,
    weights: Operands,
    buffers: tuple[Array, ...],
    out: Array,
) -> int:
    """-1, or the place of an id that names no expert."""
    w13, w2, f13, f2 = weights
    h, y, order, experts, offsets = buffers
    rows = flat.size
    used = sort_by_expert(flat, f13.shape[0], order[:rows], experts[:rows], offsets[: rows + 1])
    if used < 0:
        return -1 - used
    order, experts, offsets = order[:rows], experts[:used], offsets[: used + 1]
    slots = shares.shape[1]
    passes.gate_up(x, slots, order, experts, offsets, w13, f13, 0, h.shape[1], h)
    passes.down(h, order, experts, offsets, w2, f2, 0, y.shape[1], y)
    passes.combine(y, shares, 0, y.shape[1], out)
    return -1


@of(ExpertsSpec)
def tasks(_spec: ExpertsSpec, _shapes: Shapes) -> list[Task]:
    """Router and experts on both sides of the gate; the code is the same for every shape and format."""

    def run(tokens: int) -> None:
        weights = ExpertWeights.dense(torch.zeros(2, 32, 16), torch.zeros(2, 16, 16))
        shares, ids = route(torch.zeros(tokens, 2), 2)
        RoutedExperts(weights, 2)(torch.zeros(tokens, 16), ids, shares)

    sides = (("compact", 1), ("grouped", COMPACT_ROWS // 2 + 1))
    return [Task(f"{OP} {name}", partial(run, tokens)) for name, tokens in sides]
