"""RMS norms on the CPU: `(1 + w)` over a row or over each stream of it, and the gated one of GatedDeltaNet.

Prepared once with the weights, bound once to static buffers, then called with the number of rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from stallwatch_kernels import warmup
from stallwatch_kernels.errors import BadDtype, BadMetadata, BadShape
from stallwatch_kernels.jit import kernel, reduction
from stallwatch_kernels.norm.rows import FLOATS, rows_of
from stallwatch_kernels.norm.scalar import ONE, load, sigmoid32, silu32, store
from stallwatch_kernels.pool import SERIAL, RowPool
from stallwatch_kernels.tensors import Array, check_eps, check_rows, same_or_apart

ACTIVATIONS = ("silu", "sigmoid")
Call = Callable[[int], None]
"""A kernel bound to its buffers: computes the first n rows."""


@dataclass(frozen=True, slots=True)
class RmsSpec:
    """A norm over `width` elements in groups of `group`, in `dtype`; `gated`: by `activation` of a second input."""

    width: int
    group: int
    dtype: torch.dtype
    gated: bool = False
    activation: str = "silu"


class RmsNorm:
    """out = x / rms(x) * (1 + weight), rms over each group of the row. fp32 inside."""

    def __init__(
        self, weight: torch.Tensor, eps: float, group: int | None = None, pool: RowPool = SERIAL
    ) -> None:
        self.width = weight.numel()
        self.group = group or self.width
        if weight.ndim != 1 or self.group < 1 or self.width % self.group:
            raise BadShape(
                "rms_norm", "weight", f"{tuple(weight.shape)} is no row of {self.group}s"
            )
        self._factor: Array = (1.0 + weight.detach().double()).float().numpy()
        self._eps = check_eps("rms_norm", eps)
        self._pool = pool

    def bind(self, x: torch.Tensor, out: torch.Tensor) -> Call:
        """Bind to static `x`, `out` [rows, width] of one type, float32 or bfloat16; they may be the same."""
        same_rows("rms_norm", x, out)
        same_or_apart("rms_norm", ("out", "x"), out, x)
        xs, x_step = rows_of("rms_norm", "x", x, self.width, *FLOATS)
        os, o_step = rows_of("rms_norm", "out", out, self.width, x.dtype)
        head = (xs, x_step, os, o_step, self._factor, self.group, self._eps)
        return bound(partial(rms_rows, *head), self._pool, x.shape[0], "rms_norm")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The convenient form: checks, allocates, runs."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self.bind(x, out)(x.shape[0])
        return out


class GatedRmsNorm:
    """out = x / rms(x) * weight * silu(gate), rms over each head of `len(weight)` elements. fp32 inside.

    `activation` of the gate: silu, or sigmoid in its place.
    """

    def __init__(
        self, weight: torch.Tensor, eps: float, pool: RowPool = SERIAL, activation: str = "silu"
    ) -> None:
        if weight.ndim != 1 or not weight.numel():
            raise BadShape("gated_rms_norm", "weight", f"{tuple(weight.shape)} is no vector")
        if activation not in ACTIVATIONS:
            raise BadMetadata("gated_rms_norm", "activation", f"is {activation!r}; silu or sigmoid")
        self._rows = gated_rows if activation == "silu" else sigmoid_rows
        self._weight: Array = weight.detach().float().contiguous().numpy()
        self._eps = check_eps("gated_rms_norm", eps)
        self._pool = pool

    def bind(self, x: torch.Tensor, gate: torch.Tensor, out: torch.Tensor) -> Call:
        """Bind to static `x`, `gate`, `out` [rows, heads * width] of one type; `out` may be `x`."""
        name = "gated_rms_norm"
        width = x.shape[-1]
        if x.ndim != 2 or width % len(self._weight):
            raise BadShape(
                name, "x", f"has shape {tuple(x.shape)}: no heads of {len(self._weight)}"
            )
        same_rows(name, x, gate, out)
        same_or_apart(name, ("out", "x"), out, x)
        same_or_apart(name, ("out", "gate"), out, gate)
        xs, x_step = rows_of(name, "x", x, width, *FLOATS)
        zs, z_step = rows_of(name, "gate", gate, width, x.dtype)
        os, o_step = rows_of(name, "out", out, width, x.dtype)
        head = (xs, x_step, zs, z_step, os, o_step, self._weight, width, self._eps)
        return bound(partial(self._rows, *head), self._pool, x.shape[0], name)

    def __call__(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """The convenient form: checks, allocates, runs."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self.bind(x, gate, out)(x.shape[0])
        return out


def same_rows(name: str, first: torch.Tensor, *others: torch.Tensor) -> None:
    """Refuse buffers that differ in rows or type."""
    for other in others:
        if other.shape[:1] != first.shape[:1]:
            raise BadShape(
                name, "buffers", f"have {first.shape[0]} and {other.shape[0]} rows, not the same"
            )
        if other.dtype != first.dtype:
            raise BadDtype(name, "buffers", f"are {first.dtype} and {other.dtype}, not one type")


def bound(work: Callable[..., object], pool: RowPool, most: int, name: str) -> Call:
    """A call that computes the first `rows` of at most `most`."""
    if pool.threads == 1:

        def run_here(rows: int) -> None:
            check_rows(name, rows, most)
            if rows:
                work(0, rows)

        return run_here

    def run_over_threads(rows: int) -> None:
        check_rows(name, rows, most)
        pool.run(work, rows)

    return run_over_threads


@reduction
def mean_square(values: Array) -> np.float32:
    """Mean of the squares of a vector, in the order that the compiler fixed for its length."""
    total = np.float32(0.0)
    for i in range(values.shape[0]):
        v = load(values, i)
        total += v * v
    return np.float32(total / np.float32(values.shape[0]))


@kernel
def rms_rows(  # noqa: PLR0913, PLR0917
    x: Array,
    x_step: int,
    out: Array,
    out_step: int,
    factor: Array,
    group: int,
    eps: np.float32,
    lo: int,
    hi: int,
) -> None:
    """Rows lo to hi of RmsNorm; `factor` is 1 + weight."""
    width = factor.shape[0]
    for row in range(lo, hi):
        for start in range(0, width, group):
            values = x[row * x_step + start : row * x_step + start + group]
            factors = factor[start : start + group]
            result = out[row * out_step + start : row * out_step + start + group]
            scale = np.float32(ONE / np.sqrt(mean_square(values) + eps))
            for i in range(group):
                store(result, i, load(values, i) * scale * factors[i])


@kernel
def gated_rows(  # noqa: PLR0913, PLR0917
    x: Array,
    x_step: int,
    gate: Array,
    gate_step: int,
    out: Array,
    out_step: int,
    weight: Array,
    width: int,
    eps: np.float32,
    lo: int,
    hi: int,
) -> None:
    """Rows lo to hi of GatedRmsNorm."""
    head = weight.shape[0]
    for row in range(lo, hi):
        for start in range(0, width, head):
            values = x[row * x_step + start : row * x_step + start + head]
            gates = gate[row * gate_step + start : row * gate_step + start + head]
            result = out[row * out_step + start : row * out_step + start + head]
            scale = np.float32(ONE / np.sqrt(mean_square(values) + eps))
            for i in range(head):
                store(result, i, load(values, i) * scale * weight[i] * silu32(load(gates, i)))


@kernel
def sigmoid_rows(  # noqa: PLR0913, PLR0917
    x: Array,
    x_step: int,
    gate: Array,
    gate_step: int,
    out: Array,
    out_step: int,
    weight: Array,
    width: int,
    eps: np.float32,
    lo: int,
    hi: int,
) -> None:
    """Rows lo to hi of GatedRmsNorm with a sigmoid gate: a kernel of its own, so that neither has a branch."""
    head = weight.shape[0]
    for row in range(lo, hi):
        for start in range(0, width, head):
            values = x[row * x_step + start : row * x_step + start + head]
            gates = gate[row * gate_step + start : row * gate_step + start + head]
            result = out[row * out_step + start : row * out_step + start + head]
            scale = np.float32(ONE / np.sqrt(mean_square(values) + eps))
            for i in range(head):
                store(result, i, load(values, i) * scale * weight[i] * sigmoid32(load(gates, i)))


@warmup.of(RmsSpec)
def _warm(spec: RmsSpec, shapes: warmup.Shapes) -> Iterable[warmup.Task]:
    kind = "rms_norm"
    if spec.gated:
        kind = (
            "gated_rms_norm" if spec.activation == "silu" else f"gated_rms_norm {spec.activation}"
        )

    def run() -> None:
        x = torch.zeros(max(shapes.rows), spec.width, dtype=spec.dtype)
        if spec.gated:
            GatedRmsNorm(torch.ones(spec.group), 1e-6, activation=spec.activation)(x, x)
        else:
            RmsNorm(torch.zeros(spec.width), 1e-6, spec.group)(x)

    yield warmup.Task(f"{kind} {str(spec.dtype).removeprefix('torch.')}", run)
