"""What lies between the projections of a sparse-attention layer and its attention, one compiled call each.

`Project`: norms and rotary positions of queries, keys and index queries, out of one merged projection.
`scatter`: a step's rows into pages. `gate_rows`: the output gate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

from stallwatch_kernels import warmup
from stallwatch_kernels.errors import BadDtype, BadLayout, BadShape
from stallwatch_kernels.jit import inlined, kernel
from stallwatch_kernels.norm.rms import mean_square
from stallwatch_kernels.norm.rows import FLOATS, rows_of
from stallwatch_kernels.norm.scalar import ONE, load, sigmoid32, store
from stallwatch_kernels.qsa.layout import BLOCK
from stallwatch_kernels.qsa.rotary import Rotary
from stallwatch_kernels.tensors import Array, apart, check_eps, check_rows, contiguous

KERNEL = "qsa-project"
Rows = tuple[Array, int]
"""Flat memory and the elements from row to row."""

_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.float32}


@dataclass(frozen=True, slots=True)
class Heads:
    """Query and KV heads of `size`, `index` heads of `index_size`; one merged row holds
    (query | gate) of every head, keys, values, index queries, and the one raw index key.
    """

    query: int
    kv: int
    size: int
    index: int
    index_size: int

    @property
    def width(self) -> int:
        """Elements of a merged row."""
        attention = (2 * self.query + 2 * self.kv) * self.size
        return attention + (self.index + 1) * self.index_size


@dataclass(frozen=True, slots=True)
class ProjectSpec:
    """What a warm-up needs: the type of the merged rows and of the keys and values in the cache."""

    heads: Heads
    dtype: torch.dtype
    kv_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Projected:
    """Static buffers for M rows. q, k, v, index_q are float32; raw has the merged rows' type."""

    q: torch.Tensor  # [M, Hq, d]
    k: torch.Tensor  # [M, Hkv * d]
    v: torch.Tensor  # [M, Hkv * d]
    index_q: torch.Tensor  # [M, Hi, di]
    raw: torch.Tensor  # [M, di]

    @classmethod
    def empty(cls, heads: Heads, rows: int, dtype: torch.dtype) -> Projected:
        """Buffers of zeros."""
        wide = heads.kv * heads.size
        return cls(
            torch.zeros(rows, heads.query, heads.size),
            torch.zeros(rows, wide),
            torch.zeros(rows, wide),
            torch.zeros(rows, heads.index, heads.index_size),
            torch.zeros(rows, heads.index_size, dtype=dtype),
        )


class Project:
    """Norms `(1 + w)` of query [d], key [d] and index query [di], then the positions' rotation."""

    def __init__(
        self,
        heads: Heads,
        norms: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rotary: Rotary,
        eps: float,
    ) -> None:
        sizes = (heads.size, heads.size, heads.index_size)
        if tuple(norm.numel() for norm in norms) != sizes:
            raise BadShape(KERNEL, "norms", f"must be vectors of {sizes}")
        if rotary.cos.shape[1] > min(sizes):
            raise BadShape(KERNEL, "rotary", f"turns {rotary.cos.shape[1]} of {min(sizes)}")
        self.heads = heads
        self._factors = tuple((1.0 + n.detach().double()).float().numpy() for n in norms)
        self._turn = (rotary.cos.numpy(), rotary.sin.numpy())
        self._eps = check_eps(KERNEL, eps)

    def bind(
        self, merged: torch.Tensor, positions: torch.Tensor, out: Projected
    ) -> Callable[[int], None]:
        """Bind to static merged rows [M, width] and positions int32[M]; a call takes the rows."""
        source = rows_of(KERNEL, "merged", merged, self.heads.width, *FLOATS)
        places = contiguous(KERNEL, "positions", positions, torch.int32)
        heads = self.heads
        _check_projected(heads, merged, out)
        sizes = (heads.query, heads.kv, heads.size, heads.index, heads.index_size)
        targets = tuple(
            contiguous(KERNEL, "out", each, torch.float32).reshape(-1)
            for each in (out.q, out.k, out.v, out.index_q)
        )
        raw = contiguous(KERNEL, "raw", out.raw, merged.dtype).reshape(-1)
        about = (self._factors, self._turn, self._eps)
        most = min(len(merged), places.size)

        def run(rows: int) -> None:
            check_rows(KERNEL, rows, most)
            _project(source, places, sizes, about, targets, raw, rows)

        return run


def _check_projected(heads: Heads, merged: torch.Tensor, out: Projected) -> None:
    """Refuse buffers of other rows or heads than `merged` has, and those that share its memory."""
    rows, wide = len(merged), heads.kv * heads.size
    shapes = {
        "q": (rows, heads.query, heads.size),
        "k": (rows, wide),
        "v": (rows, wide),
        "index_q": (rows, heads.index, heads.index_size),
        "raw": (rows, heads.index_size),
    }
    for name, shape in shapes.items():
        buffer: torch.Tensor = getattr(out, name)
        if buffer.shape != shape:
            raise BadShape(KERNEL, name, f"is {tuple(buffer.shape)}; expected {shape}")
        apart(KERNEL, (name, "merged"), buffer, merged)


@inlined
def _head(  # noqa: PLR0917
    source: Array, first: int, size: int, factor: Array, turn: tuple[Array, Array], eps: np.float32
) -> Array:
    """One head, normed and turned, float32."""
    cos, sin = turn
    values = source[first : first + size]
    scale = np.float32(ONE / np.sqrt(mean_square(values) + eps))
    out = np.empty(size, np.float32)
    for i in range(size):
        out[i] = load(values, i) * scale * factor[i]
    half = cos.shape[0] // 2
    for i in range(half):
        a, b = out[i], out[half + i]
        out[i] = np.float32(a * cos[i]) - np.float32(b * sin[i])
        out[half + i] = np.float32(b * cos[half + i]) + np.float32(a * sin[half + i])
    return out


@kernel
def _project(  # noqa: PLR0917
    merged: Rows,
    positions: Array,
    sizes: tuple[int, ...],
    about: tuple[tuple[Array, ...], tuple[Array, Array], np.float32],
    targets: tuple[Array, ...],
    raw: Array,
    rows: int,
) -> None:
    flat, step = merged
    heads, kv, size, index, index_size = sizes
    factors, turns, eps = about
    q, k, v, index_q = targets
    last = turns[0].shape[0] - 1
    for row in range(rows):
        place = min(max(positions[row], 0), last)
        turn = (turns[0][place], turns[1][place])
        at = row * step
        for h in range(heads):
            to = (row * heads + h) * size
            q[to : to + size] = _head(flat, at + 2 * h * size, size, factors[0], turn, eps)
        at += 2 * heads * size
        for h in range(kv):
            to = (row * kv + h) * size
            k[to : to + size] = _head(flat, at + h * size, size, factors[1], turn, eps)
        at += kv * size
        for i in range(kv * size):
            v[row * kv * size + i] = load(flat, at + i)
        at += kv * size
        for h in range(index):
            to = (row * index + h) * index_size
            index_q[to : to + index_size] = _head(
                flat, at + h * index_size, index_size, factors[2], turn, eps
            )
        at += index * index_size
        for i in range(index_size):
            raw[row * index_size + i] = flat[at + i]


@dataclass(frozen=True, slots=True)
class Places:
    """Where rows go: page_table int32[R, max_pages], row_req and row_pos int32[M]."""

    page_table: torch.Tensor
    row_req: torch.Tensor
    row_pos: torch.Tensor


def bind_scatter(rows: torch.Tensor, cache: torch.Tensor, places: Places) -> Callable[[int], None]:
    """Static rows [M, n] of the cache's type into `cache` [pages, page, ...] of n elements a token.

    A row without request, page or place is dropped.
    """
    if cache.ndim < 2 or 0 in cache.shape[1:]:
        raise BadShape(KERNEL, "cache", f"is {tuple(cache.shape)}; expected [pages, page, ...]")
    width = cache.shape[2:].numel()
    if rows.ndim != 2 or rows.shape[1] != width or rows.dtype != cache.dtype:
        raise BadShape(KERNEL, "rows", f"are {rows.dtype}{tuple(rows.shape)}; a token has {width}")
    if not (rows.is_contiguous() and cache.is_contiguous()):
        raise BadLayout(KERNEL, "rows, cache", "are not contiguous")
    if rows.dtype.is_complex or rows.element_size() not in _BITS:
        raise BadDtype(KERNEL, "rows", f"are {rows.dtype}; expected 1, 2 or 4 bytes an element")
    apart(KERNEL, ("cache", "rows"), cache, rows)
    bits = _BITS[rows.element_size()]
    source = rows.detach().view(bits).numpy()
    target = cache.detach().view(bits).numpy().reshape(cache.shape[0] * cache.shape[1], width)
    table = contiguous(KERNEL, "page_table", places.page_table, torch.int32)
    owner = contiguous(KERNEL, "row_req", places.row_req, torch.int32)
    where = contiguous(KERNEL, "row_pos", places.row_pos, torch.int32)
    if table.ndim != 2 or {owner.shape, where.shape} != {(len(rows),)}:
        raise BadShape(KERNEL, "row_req, row_pos", f"are not for the {len(rows)} rows")
    page = cache.shape[1]

    def run(count: int) -> None:
        check_rows(KERNEL, count, len(source))
        _scatter(source, target, table, (owner, where), page, count)

    return run


@kernel
def _scatter(  # noqa: PLR0917
    source: Array, target: Array, table: Array, places: tuple[Array, Array], page: int, rows: int
) -> None:
    owner, where = places
    for row in range(rows):
        request, position = owner[row], where[row]
        if not (0 <= request < table.shape[0] and 0 <= position < page * table.shape[1]):
            continue
        at = table[request, position // page]
        if 0 <= at < target.shape[0] // page:
            target[at * page + position % page] = source[row]


def bind_gate(
    values: torch.Tensor, merged: torch.Tensor, out: torch.Tensor, heads: Heads
) -> Callable[[int], None]:
    """Static float32 values [M, Hq, d] times the sigmoid of their gates, into out [M, Hq * d] of merged's type."""
    source = contiguous(KERNEL, "values", values, torch.float32).reshape(-1)
    gates = rows_of(KERNEL, "merged", merged, heads.width, *FLOATS)
    target = contiguous(KERNEL, "out", out, merged.dtype).reshape(-1)
    most = len(merged)
    if values.shape != (most, heads.query, heads.size):
        raise BadShape(KERNEL, "values", f"is {tuple(values.shape)} for {most} merged rows")
    if out.shape != (most, heads.query * heads.size):
        raise BadShape(KERNEL, "out", f"is {tuple(out.shape)} for {most} merged rows")
    apart(KERNEL, ("out", "merged"), out, merged)
    apart(KERNEL, ("out", "values"), out, values)

    def run(rows: int) -> None:
        check_rows(KERNEL, rows, most)
        gate_rows(source, gates, target, (heads.query, heads.size), rows)

    return run


@kernel
def gate_rows(  # noqa: PLR0917
    values: Array, merged: Rows, out: Array, heads: tuple[int, int], rows: int
) -> None:
    """Rows 0 to `rows` of the output gate."""
    flat, step = merged
    count, size = heads
    for row in range(rows):
        for h in range(count):
            at = row * step + (2 * h + 1) * size
            to = (row * count + h) * size
            gates = flat[at : at + size]
            source, target = values[to : to + size], out[to : to + size]
            for i in range(size):
                store(target, i, source[i] * sigmoid32(load(gates, i)))


@warmup.of(ProjectSpec)
def _warm(spec: ProjectSpec, shapes: warmup.Shapes) -> Iterable[warmup.Task]:  # noqa: ARG001
    """One row without a request."""

    def run() -> None:
        heads = spec.heads
        out = Projected.empty(heads, 1, spec.dtype)
        norms = torch.zeros(heads.size), torch.zeros(heads.size), torch.zeros(heads.index_size)
        merged, zero = torch.zeros(1, heads.width, dtype=spec.dtype), torch.zeros(1).int()
        Project(heads, norms, Rotary(2, 1e4, 1), 1e-6).bind(merged, zero, out)(1)
        gated = torch.zeros(1, heads.query * heads.size, dtype=spec.dtype)
        bind_gate(out.q, merged, gated, heads)(1)
        cache = torch.zeros(1, BLOCK, heads.kv, heads.size, dtype=spec.kv_dtype)
        places = Places(torch.zeros(1, 1).int(), zero - 1, zero)
        bind_scatter(out.k.to(spec.kv_dtype), cache, places)(1)

    names = (str(d).removeprefix("torch.") for d in (spec.dtype, spec.kv_dtype))
    yield warmup.Task(f"{KERNEL} {' '.join(names)}", run)
