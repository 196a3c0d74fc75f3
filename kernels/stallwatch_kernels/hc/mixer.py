"""Reading and writing the residual streams on the CPU.

One compiled call does a whole read, the two narrow products included: alone, each would cost more to call than to
compute. In float32 it takes any number of rows and a row has the same bits in any batch. In bfloat16 it takes the
rows of a decode step; above, torch's matrix unit does the products, in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from stallwatch_kernels import warmup
from stallwatch_kernels.admission import Candidate, choose
from stallwatch_kernels.errors import BadDtype, BadShape
from stallwatch_kernels.hc.reference import Weights
from stallwatch_kernels.jit import kernel
from stallwatch_kernels.linear.native import call_panel, panel_address
from stallwatch_kernels.linear.vectors import BF16, F32
from stallwatch_kernels.norm.rms import Call, bound, rms_rows
from stallwatch_kernels.norm.rows import FLOATS, rows_of
from stallwatch_kernels.norm.scalar import ONE, TWO, load, sigmoid32, silu32, store
from stallwatch_kernels.pool import SERIAL, RowPool
from stallwatch_kernels.tensors import Array, apart, check_eps

OP = "hyper_connection"
FUSED_BF16_ROWS = 16
"""Most rows of a bfloat16 read that the compiled call takes."""

Rows = tuple[Array, int]
"""Flat memory and the elements from row to row."""

_BLOCK = 16  # rows that share one pass over the weights
_FORMATS = {torch.float32: F32, torch.bfloat16: BF16}


@dataclass(frozen=True, slots=True)
class MixerSpec:
    """`streams` of `hidden` elements in `dtype`, mixed through `rank`; `fold`: the last one, which only reads."""

    streams: int
    hidden: int
    rank: int
    dtype: torch.dtype
    fold: bool = False


def candidates(dtype: torch.dtype, rows: int) -> list[Candidate]:
    """The compiled read first, torch's products after it (bfloat16 only: in float32 bits must hold)."""
    few = dtype == torch.float32 or rows <= FUSED_BF16_ROWS
    return [
        ("fused", None if few else f"takes at most {FUSED_BF16_ROWS} rows in bfloat16"),
        ("gemm", None if dtype == torch.bfloat16 else "rounds differently in every batch"),
    ]


class Mixer:
    """The hyper-connection around one block, or the final fold (no `inject`): weights in float32 or bfloat16."""

    def __init__(self, weights: Weights, pool: RowPool = SERIAL) -> None:
        rank, width = weights.down.shape
        _check(weights, rank, width)
        inject = [] if weights.inject is None else [weights.inject]
        self.streams, self.hidden, self.rank = weights.streams, width // weights.streams, rank
        self.dtype = weights.down.dtype
        # One product for both that read the normed rows.
        self._first = torch.cat([weights.down, *inject]).detach().contiguous()
        self._second = weights.up.detach().contiguous()
        self._factor: Array = (1.0 + weights.norm.detach().double()).float().numpy()
        self._eps = check_eps(OP, weights.eps)
        self._injects = weights.inject is not None
        self._pool = pool

    def bind_read(
        self, h: torch.Tensor, x: torch.Tensor, injection: torch.Tensor | None = None
    ) -> Call:
        """Bind to static h [rows, S*H], x [rows, H] in the weights' type, injection float32 [rows, S]."""
        width = self.streams * self.hidden
        hs = rows_of(OP, "h", h, width, self.dtype)
        xs = rows_of(OP, "x", x, self.hidden, self.dtype)
        if (injection is not None) != self._injects:
            expected = "a buffer: it has" if self._injects else "None: the final fold has no"
            raise BadShape(OP, "injection", f"must be {expected} injection weights")
        given = torch.empty(h.shape[0], 0) if injection is None else injection
        gains = rows_of(OP, "injection", given, self.streams * self._injects, torch.float32)
        if not h.shape[0] == x.shape[0] == given.shape[0]:
            raise BadShape(OP, "h, x, injection", "must have the same number of rows")
        apart(OP, ("x", "h"), x, h)
        apart(OP, ("injection", "h"), given, h)
        apart(OP, ("injection", "x"), given, x)
        head = (hs, xs, gains, self._factor, self._eps)
        plan = self._plan()

        def fused(lo: int, hi: int, _alive: object = (self._first, self._second)) -> None:
            read_rows(*head, plan, lo, hi)  # the plan holds addresses and no references

        run = bound(fused, self._pool, h.shape[0], OP)
        if choose(OP, candidates(self.dtype, h.shape[0])).impl == "fused":
            return run
        products = bound(self._products(h, head), SERIAL, h.shape[0], OP)
        # The same buffers serve decode and prefill: the row count of the call decides.
        return lambda rows: run(rows) if rows <= FUSED_BF16_ROWS else products(rows)

    def bind_write(self, h: torch.Tensor, y: torch.Tensor, injection: torch.Tensor) -> Call:
        """Bind to static h [rows, S*H] (changed in place), y [rows, H], injection float32 [rows, S]."""
        hs = rows_of(OP, "h", h, self.streams * self.hidden, *FLOATS)
        ys = rows_of(OP, "y", y, self.hidden, h.dtype)
        gains = rows_of(OP, "injection", injection, self.streams, torch.float32)
        if not h.shape[0] == y.shape[0] == injection.shape[0]:
            raise BadShape(OP, "h, y, injection", "must have the same number of rows")
        apart(OP, ("h", "y"), h, y)
        apart(OP, ("h", "injection"), h, injection)
        work = partial(write_rows, hs, ys, gains, self.streams, self.hidden)
        return bound(work, self._pool, h.shape[0], OP)

    def read(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The convenient form: checks, allocates, runs."""
        x = h.new_empty(h.shape[0], self.hidden)
        gains = torch.empty(h.shape[0], self.streams) if self._injects else None
        self.bind_read(h, x, gains)(h.shape[0])
        return x, gains

    def write(self, h: torch.Tensor, y: torch.Tensor, injection: torch.Tensor) -> torch.Tensor:
        """h, changed in place."""
        self.bind_write(h, y, injection)(h.shape[0])
        return h

    def _plan(self) -> tuple[int, ...]:
        """What the compiled read needs of the weights, all integers."""
        size = self._first.element_size()
        return (
            panel_address(),
            _FORMATS[self.dtype],
            self._first.data_ptr(),
            self._first.stride(0) * size,
            self._first.shape[0],
            self._second.data_ptr(),
            self._second.stride(0) * size,
            self.rank,
            self.streams,
        )

    def _products(
        self, h: torch.Tensor, head: tuple[Rows, Rows, Rows, Array, np.float32]
    ) -> Callable[[int, int], None]:
        """Many rows in bfloat16: torch's matrix products between compiled element-wise passes."""
        first, second, rank, hidden = self._first.t(), self._second.t(), self.rank, self.hidden
        hs, xs, gains, factor, eps = head
        normed = torch.empty(h.shape[0], self.streams * hidden)
        flat = normed.flatten().numpy()

        def run(_lo: int, rows: int) -> None:
            rms_rows(hs[0], hs[1], flat, factor.shape[0], factor, hidden, eps, 0, rows)
            low = (normed[:rows].to(self.dtype) @ first).float()
            activate_rows(low.numpy(), gains, self.streams, rank, 0)
            mix = (low[:, :rank].to(self.dtype) @ second).float()
            fold_rows(mix.numpy(), normed[:rows].numpy(), xs, self.streams, 0)

        return run


def _check(weights: Weights, rank: int, width: int) -> None:
    inject, streams = weights.inject, weights.streams
    if streams < 1 or width % streams:
        raise BadShape(OP, "down", f"has {width} columns, no {streams} streams")
    if weights.up.shape != (width, rank) or weights.norm.shape != (width,):
        raise BadShape(OP, "up, norm", f"must be [{width}, {rank}] and [{width}]")
    if inject is not None and inject.shape != (streams, width):
        raise BadShape(OP, "inject", f"is {tuple(inject.shape)}; expected [{streams}, {width}]")
    kinds = {w.dtype for w in (weights.down, weights.up, inject) if w is not None}
    if len(kinds) > 1 or kinds.isdisjoint(_FORMATS):
        raise BadDtype(OP, "weights", f"are {kinds}; expected all float32 or all bfloat16")


@kernel
def read_rows(  # noqa: PLR0917
    h: Rows,
    x: Rows,
    gains: Rows,
    factor: Array,
    eps: np.float32,
    plan: tuple[int, ...],
    lo: int,
    hi: int,
) -> None:
    """Rows lo to hi of a read, a block of rows at a time."""
    panel, form, first, first_step, outputs, second, second_step, rank, streams = plan
    width = factor.shape[0]
    hidden = width // streams
    most = min(_BLOCK, hi - lo)
    normed = np.empty((most, width), np.float32)
    low = np.empty((most, outputs), np.float32)
    mix = np.empty((most, width), np.float32)
    n, y, u = normed.ctypes.data, low.ctypes.data, mix.ctypes.data
    for start in range(lo, hi, most):
        rows = min(most, hi - start)
        rms_rows(
            h[0][start * h[1] :], h[1], normed.reshape(-1), width, factor, hidden, eps, 0, rows
        )
        call_panel(
            panel,
            form,
            n,
            4 * width,
            rows,
            first,
            first_step,
            0,
            0,
            0,
            width,
            outputs,
            y,
            4 * outputs,
        )
        activate_rows(low[:rows], gains, streams, rank, start)
        call_panel(
            panel,
            form,
            y,
            4 * outputs,
            rows,
            second,
            second_step,
            0,
            0,
            0,
            rank,
            width,
            u,
            4 * width,
        )
        fold_rows(mix[:rows], normed[:rows], x, streams, start)


@kernel
def activate_rows(  # noqa: PLR0917
    low: Array, gains: Rows, streams: int, rank: int, start: int
) -> None:
    """In place: silu(low / S) in the first `rank` columns; 2 sigmoid(. / S) of the others to the injection."""
    share = np.float32(ONE / np.float32(streams))
    for row in range(low.shape[0]):
        values = low[row, :rank]
        for i in range(rank):
            values[i] = silu32(values[i] * share)
        for s in range(low.shape[1] - rank):
            gains[0][(start + row) * gains[1] + s] = TWO * sigmoid32(low[row, rank + s] * share)


@kernel
def fold_rows(mix: Array, normed: Array, x: Rows, streams: int, start: int) -> None:  # noqa: PLR0917
    """X = mean over the streams of sigmoid(mix) * normed, in the order of the streams."""
    hidden = mix.shape[1] // streams
    share = np.float32(ONE / np.float32(streams))
    total = np.empty(hidden, np.float32)
    for row in range(mix.shape[0]):
        total[:] = np.float32(0.0)
        for s in range(streams):
            weights, values = mix[row, s * hidden :], normed[row, s * hidden :]
            for i in range(hidden):
                total[i] += sigmoid32(weights[i]) * values[i]
        result = x[0][(start + row) * x[1] :]
        for i in range(hidden):
            store(result, i, total[i] * share)


@kernel
def write_rows(  # noqa: PLR0917
    h: Rows, y: Rows, gains: Rows, streams: int, hidden: int, lo: int, hi: int
) -> None:
    """Rows lo to hi of a write."""
    for row in range(lo, hi):
        added = y[0][row * y[1] : row * y[1] + hidden]
        for s in range(streams):
            gain = gains[0][row * gains[1] + s]
            stream = h[0][row * h[1] + s * hidden : row * h[1] + (s + 1) * hidden]
            for i in range(hidden):
                store(stream, i, load(stream, i) + gain * load(added, i))


@warmup.of(MixerSpec)
def _warm(spec: MixerSpec, shapes: warmup.Shapes) -> Iterable[warmup.Task]:
    def run() -> None:
        width, rows = spec.streams * spec.hidden, max(shapes.rows)
        down = torch.zeros(spec.rank, width, dtype=spec.dtype)
        inject = None if spec.fold else torch.zeros(spec.streams, width, dtype=spec.dtype)
        up, norm = torch.zeros(width, spec.rank, dtype=spec.dtype), torch.zeros(width)
        mixer = Mixer(Weights(down, up, norm, inject, spec.streams, 1e-6))
        h = torch.zeros(rows, width, dtype=spec.dtype)
        x, gains = mixer.read(h)
        mixer.read(h[:1])
        if gains is not None:
            mixer.write(h, x, gains)

    kind = str(spec.dtype).removeprefix("torch.")
    yield warmup.Task(f"{OP} {'fold' if spec.fold else 'read and write'} {kind}", run)
