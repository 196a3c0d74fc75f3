"""The PLE gate: how much of a token's n-gram value enters each residual stream.

With S streams of H elements and RMS norms over each stream (weights stored as w, applied as 1 + w):

    k = norm_k(K), q = norm_q(h);  d = <k, q> / sqrt(H) per stream
    g = sigmoid(sign(d) * sqrt(max(|d|, 1e-6)));  u = g * v;  c = norm_c(u)

u goes to the output, c into the convolution. Inside everything is float32 (the few numbers per stream
float64) and is rounded once; u and c of padding rows are zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stallwatch_kernels import warmup
from stallwatch_kernels.admission import Candidate, choose
from stallwatch_kernels.errors import BadDtype, BadMetadata, BadScale, BadShape
from stallwatch_kernels.jit import inlined, kernel, reduction
from stallwatch_kernels.norm.rows import FLOATS, rows_of
from stallwatch_kernels.norm.scalar import load, store
from stallwatch_kernels.pool import SERIAL, RowPool
from stallwatch_kernels.tensors import Array, apart, same_or_apart

KERNEL = "ple.gate"
_FLOOR = 1e-6  # of |d| under the square root
_LEAST_TOKENS = 8


@dataclass(frozen=True, slots=True)
class GateSpec:
    """What decides the implementation, and what a warm-up needs."""

    streams: int
    hidden: int
    dtype: torch.dtype
    device: str = "cpu"


def candidates(spec: GateSpec) -> list[Candidate]:
    """The compiled kernel first, torch after it."""
    refusal: str | None = None
    if spec.device != "cpu":
        refusal = "runs on the CPU"
    elif spec.dtype not in FLOATS:
        refusal = "reads float32 and bfloat16"
    return [("numba", refusal), ("torch", None)]


@dataclass(frozen=True, slots=True)
class GateWeights:
    """The three norms' weights [S * H], as stored: 0 means a factor of 1."""

    key: torch.Tensor
    query: torch.Tensor
    conv: torch.Tensor
    streams: int
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.streams < 1 or self.key.numel() % self.streams or self.key.ndim != 1:
            problem = f"is {tuple(self.key.shape)}, and there are {self.streams} streams"
            raise BadShape(KERNEL, "key", problem)
        for name in ("query", "conv"):
            if getattr(self, name).shape != self.key.shape:
                raise BadShape(KERNEL, name, f"differs in shape from key, {tuple(self.key.shape)}")
        if not (math.isfinite(self.eps) and self.eps > 0):
            raise BadScale(KERNEL, "eps", f"is {self.eps}; expected finite and positive")

    @property
    def hidden(self) -> int:
        """H."""
        return int(self.key.numel() // self.streams)


class Gate:
    """The gate of one layer, its norms' weights prepared."""

    def __init__(self, weights: GateWeights, pool: RowPool = SERIAL) -> None:
        self.weights = weights
        self._pool = pool
        device = weights.key.device.type
        spec = GateSpec(weights.streams, weights.hidden, torch.float32, device)
        self.choice = choose(KERNEL, candidates(spec))
        key, query, conv = (
            1.0 + w.detach().double() for w in (weights.key, weights.query, weights.conv)
        )
        self._dot: Array = (key * query).float().cpu().numpy()  # <k, q> needs only the product
        self._conv: Array = conv.float().cpu().numpy()

    def __call__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        hidden: torch.Tensor,
        *,
        tokens: int,
        u: torch.Tensor | None = None,
        c: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(u, c), [T, S * H] each, from keys [T, S*H], values [T, H] and the residual `hidden` [T, S*H].

        All float32 or all bfloat16; keys and values may be slices of one projection. Rows from `tokens`
        on are padding.
        """
        wide = self.weights.streams * self.weights.hidden
        u = hidden.new_empty(len(hidden), wide) if u is None else u
        c = hidden.new_empty(len(hidden), wide) if c is None else c
        self.bind(keys, values, hidden, u=u, c=c)(tokens, len(hidden))
        return u, c

    def bind(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        hidden: torch.Tensor,
        *,
        u: torch.Tensor,
        c: torch.Tensor,
    ) -> BoundGate:
        """Bind to static buffers of the shapes above, so that a call has nothing left to check."""
        for name, tensor in {"keys": keys, "values": values, "u": u, "c": c}.items():
            if tensor.dtype != hidden.dtype:
                raise BadDtype(KERNEL, name, f"is {tensor.dtype}, and hidden is {hidden.dtype}")
            if len(tensor) != len(hidden):
                raise BadShape(KERNEL, name, f"has {len(tensor)} rows, and hidden {len(hidden)}")
        for name, written in (("u", u), ("c", c)):
            apart(KERNEL, (name, "values"), written, values)  # which every stream reads
            same_or_apart(KERNEL, (name, "keys"), written, keys)
            same_or_apart(KERNEL, (name, "hidden"), written, hidden)
        apart(KERNEL, ("u", "c"), u, c)
        return BoundGate(self, (keys, values, hidden), (u, c))


class BoundGate:
    """A gate between fixed buffers."""

    def __init__(
        self, gate: Gate, read: tuple[torch.Tensor, ...], written: tuple[torch.Tensor, ...]
    ) -> None:
        weights = gate.weights
        self.rows = len(read[0])
        self._gate, self._read, self._written = gate, read, written
        self._plain = gate.choice.impl == "torch"
        if self._plain:
            return
        wide = weights.streams * weights.hidden
        names = {"keys": wide, "values": weights.hidden, "hidden": wide, "u": wide, "c": wide}
        cut = [
            rows_of(KERNEL, name, tensor, width, *FLOATS)
            for (name, width), tensor in zip(names.items(), (*read, *written), strict=True)
        ]
        self._sources = (*cut[0], *cut[1], *cut[2])
        self._about = (gate._dot, gate._conv, weights.streams, weights.eps)
        self._targets = (*cut[3], *cut[4])

    def __call__(self, tokens: int, rows: int) -> None:
        """Gate the first `tokens` and make the rows after them, up to `rows`, zero."""
        if not 0 <= tokens <= rows <= self.rows:
            problem = f"is {tokens}, of {rows} rows in buffers of {self.rows}"
            raise BadMetadata(KERNEL, "tokens", problem)
        if self._plain:
            found = reference(self._gate.weights, *(t.detach()[:rows].float() for t in self._read))
            for target, value in zip(self._written, found, strict=True):
                target[:rows] = value
                target[tokens:rows] = 0
            return
        self._gate._pool.run(
            lambda lo, hi: _gate(*self._sources, *self._about, tokens, *self._targets, lo, hi),
            rows,
            least=_LEAST_TOKENS,
        )


def reference(
    weights: GateWeights, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(u, c) in plain torch, in the inputs' dtype; float64 is the judge of the fast path."""
    streams = weights.streams
    k = group_norm(keys, weights.key, streams, weights.eps).unflatten(-1, (streams, -1))
    q = group_norm(hidden, weights.query, streams, weights.eps).unflatten(-1, (streams, -1))
    d = (k * q).sum(-1, keepdim=True) / math.sqrt(weights.hidden)
    g = torch.sigmoid(d.sign() * d.abs().clamp_min(_FLOOR).sqrt())
    u = (g * values[:, None, :]).flatten(-2)
    return u, group_norm(u, weights.conv, streams, weights.eps)


def group_norm(x: torch.Tensor, weight: torch.Tensor, groups: int, eps: float) -> torch.Tensor:
    """RMS norm over each of `groups` slices of the last dimension, times 1 + weight."""
    parts = x.unflatten(-1, (groups, -1))
    normed = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)
    return normed.flatten(-2) * (1 + weight.to(x.dtype))


@reduction
def _squares(row: Array) -> np.float32:
    total = np.float32(0)
    for j in range(len(row)):
        element = load(row, j)
        total += element * element
    return total


@reduction
def _dot(left: Array, right: Array, weight: Array) -> np.float32:
    total = np.float32(0)
    for j in range(len(weight)):
        total += load(left, j) * load(right, j) * weight[j]
    return total


@inlined
def _sigmoid_of_root(d: float) -> float:
    if np.isnan(d):
        return d
    root = np.sqrt(max(abs(d), _FLOOR))
    return float(1.0 / (1.0 + np.exp(-np.sign(d) * root)))


@inlined
def _write(values: Array, gain: Any, norm: Any, weight: Array, u: Array, c: Array) -> None:  # noqa: PLR0917
    for j in range(len(weight)):
        value = load(values, j)
        store(u, j, value * gain)
        store(c, j, value * norm * weight[j])


@kernel
def _gate(  # noqa: PLR0913, PLR0917
    keys: Array,
    key_stride: int,
    values: Array,
    value_stride: int,
    hidden: Array,
    hidden_stride: int,
    dot_weight: Array,
    conv_weight: Array,
    streams: int,
    eps: float,
    tokens: int,
    u: Array,
    u_stride: int,
    c: Array,
    c_stride: int,
    lo: int,
    hi: int,
) -> None:
    wide = len(dot_weight)
    size = wide // streams
    for t in range(lo, hi):
        u_row = u[t * u_stride : t * u_stride + wide]
        c_row = c[t * c_stride : t * c_stride + wide]
        if t >= tokens:
            u_row[:] = 0
            c_row[:] = 0
            continue
        value = values[t * value_stride : t * value_stride + size]
        value_square = np.float64(_squares(value)) / size
        for stream in range(streams):
            first, end = stream * size, (stream + 1) * size
            k = keys[t * key_stride + first : t * key_stride + end]
            q = hidden[t * hidden_stride + first : t * hidden_stride + end]
            norms = np.sqrt(np.float64(_squares(k)) / size + eps)
            norms *= np.sqrt(np.float64(_squares(q)) / size + eps)
            d = np.float64(_dot(k, q, dot_weight[first:end])) / (norms * np.sqrt(size))
            g = _sigmoid_of_root(d)
            # u is g * v, so its mean square is g^2 times that of v: no second pass over u
            norm = g / np.sqrt(g * g * value_square + eps)
            _write(
                value,
                np.float32(g),
                np.float32(norm),
                conv_weight[first:end],
                u_row[first:end],
                c_row[first:end],
            )


@warmup.of(GateSpec)
def tasks(spec: GateSpec, shapes: warmup.Shapes) -> Iterable[warmup.Task]:  # noqa: ARG001
    """One token of zeros: the kernel knows a dtype and no shapes."""

    def run() -> None:
        wide = torch.zeros(1, spec.streams * spec.hidden, dtype=spec.dtype)
        weight = torch.zeros(spec.streams * spec.hidden)
        gate = Gate(GateWeights(weight, weight, weight, spec.streams))
        gate(wide, wide[:, : spec.hidden], wide, tokens=1)

    yield warmup.Task(f"{KERNEL} {str(spec.dtype).removeprefix('torch.')}", run)
