"""The PLE convolution: depthwise, causal, dilated, with the last rows of each request kept in a slot.

    out[t] = u[t] + silu(sum_j weight[:, j] * c[t - (K - 1 - j) * dilation])

A request's slot holds the (K - 1) * dilation rows of c before this step, oldest first; zeros mean that the
sequence starts here. Decode and prefill are the same call. A request in the null slot has no state: its
rows of `out`, as those of padding, are zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from stallwatch_kernels import warmup
from stallwatch_kernels.admission import Candidate, choose
from stallwatch_kernels.errors import BadDtype, BadIndex, BadMetadata, BadShape
from stallwatch_kernels.gdn.batch import NULL_SLOT, Carried, null_batch
from stallwatch_kernels.jit import inlined, kernel
from stallwatch_kernels.norm.rows import FLOATS, rows_of
from stallwatch_kernels.norm.scalar import load, silu32, store
from stallwatch_kernels.ple.rowids import check_starts
from stallwatch_kernels.pool import SERIAL, RowPool
from stallwatch_kernels.tensors import Array, apart, contiguous, same_or_apart

KERNEL = "ple.conv"
_BLOCK = 1024  # channels whose partial sums stay in the first cache
_LEAST_TOKENS = 8


@dataclass(frozen=True, slots=True)
class PleConvSpec:
    """What decides the implementation, and what a warm-up needs."""

    channels: int
    taps: int
    dilation: int
    dtype: torch.dtype
    device: str = "cpu"


def candidates(spec: PleConvSpec) -> list[Candidate]:
    """The compiled kernel first, torch after it."""
    refusal: str | None = None
    if spec.device != "cpu":
        refusal = "runs on the CPU"
    elif spec.dtype not in FLOATS:
        refusal = "reads float32 and bfloat16"
    return [("numba", refusal), ("torch", None)]


class Conv:
    """The convolution of one layer."""

    def __init__(self, weight: torch.Tensor, dilation: int, pool: RowPool = SERIAL) -> None:
        """`weight` [S * H, K] (or the [S * H, 1, K] of a Conv1d), any float dtype."""
        taps = weight.detach().squeeze(1) if weight.ndim == 3 else weight.detach()
        if taps.ndim != 2 or not taps.numel():
            raise BadShape(KERNEL, "weight", f"is {tuple(weight.shape)}; expected (channels, taps)")
        if dilation < 1:
            raise BadMetadata(KERNEL, "dilation", f"is {dilation}; expected at least 1")
        self.channels, self.taps = taps.shape
        self.dilation = dilation
        self.history = (self.taps - 1) * dilation
        self._pool = pool
        self._taps = taps
        self._weight: Array = taps.t().float().contiguous().cpu().numpy()
        spec = PleConvSpec(self.channels, self.taps, dilation, torch.float32, weight.device.type)
        self.choice = choose(KERNEL, candidates(spec))

    def new_state(self, slots: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[slots, (K - 1) * dilation, S * H] of zeros: every slot at the start of a sequence."""
        return torch.zeros(slots, self.history, self.channels, dtype=dtype)

    def __call__(
        self,
        u: torch.Tensor,
        c: torch.Tensor,
        carried: Carried,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The sum [T, S * H]; `carried.state` moves on.

        u, c [T, S * H] and the state [slots, (K - 1) * dilation, S * H], all float32 or all bfloat16.
        Rows of requests in the null slot and past the last request are zero. `out` may be `u`.
        """
        out = torch.empty_like(u) if out is None else out
        self.bind(u, c, carried, out)(carried.slots.numel(), len(u))
        return out

    def bind(
        self, u: torch.Tensor, c: torch.Tensor, carried: Carried, out: torch.Tensor
    ) -> BoundConv:
        """Bind to static buffers of the shapes above; offsets and slots are read anew at every call."""
        for name, tensor in {"c": c, "state": carried.state, "out": out}.items():
            if tensor.dtype != u.dtype:
                raise BadDtype(KERNEL, name, f"is {tensor.dtype}, and u is {u.dtype}")
            if name != "state" and len(tensor) != len(u):
                raise BadShape(KERNEL, name, f"has {len(tensor)} rows, and u {len(u)}")
        apart(KERNEL, ("out", "c"), out, c)  # which later rows still read
        same_or_apart(KERNEL, ("out", "u"), out, u)
        apart(KERNEL, ("out", "state"), out, carried.state)
        return BoundConv(self, (u, c, out), carried)


class BoundConv:
    """A convolution between fixed buffers, over the slots of one state."""

    def __init__(
        self,
        conv: Conv,
        buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        carried: Carried,
    ) -> None:
        slots, starts = carried.slots, carried.query_start_loc
        self.rows, self.requests = len(buffers[0]), slots.numel()
        shape = tuple(carried.state.shape)
        if slots.ndim != 1 or starts.shape != (self.requests + 1,):
            problem = f"is {tuple(slots.shape)} beside offsets {tuple(starts.shape)}"
            raise BadShape(KERNEL, "slots", problem)
        if len(shape) != 3 or shape[1:] != (conv.history, conv.channels):
            expected = ("slots", conv.history, conv.channels)
            raise BadShape(KERNEL, "state", f"is {shape}; expected {expected}")
        self._conv, self._buffers, self._carried = conv, buffers, carried
        self._plain = conv.choice.impl == "torch"
        if self._plain:
            return
        u, c, out = (
            rows_of(KERNEL, name, tensor, conv.channels, *FLOATS)
            for name, tensor in zip(("u", "c", "out"), buffers, strict=True)
        )
        self._read, self._c, self._written = (*u, *c), c, out
        self._state = contiguous(KERNEL, "state", carried.state, *FLOATS)
        self._starts = contiguous(KERNEL, "query_start_loc", starts, torch.int32)
        self._slots = contiguous(KERNEL, "slots", slots, torch.int32)

    def __call__(self, requests: int, rows: int) -> None:
        """Convolve the first `requests`; rows behind them, up to `rows`, become zero."""
        starts, slots = self._batch(requests, rows)
        if self._plain:
            self._torch(requests, rows)
            return
        conv = self._conv
        about = (starts, slots, self._state, conv._weight)
        conv._pool.run(
            lambda lo, hi: _convolve(*self._read, *about, conv.dilation, *self._written, lo, hi),
            rows,
            least=_LEAST_TOKENS,
        )
        _remember(*self._c, starts, slots, self._state)

    def _batch(self, requests: int, rows: int) -> tuple[Array, Array]:
        """The offsets and slots of this call, once nothing in them leaves the buffers."""
        if not (0 <= requests <= self.requests and 0 <= rows <= self.rows):
            problem = f"is {requests} with {rows} rows; buffers hold {self.requests}, {self.rows}"
            raise BadMetadata(KERNEL, "requests", problem)
        if self._plain:
            wanted = self._carried.query_start_loc.cpu(), self._carried.slots.cpu()
            starts = contiguous(KERNEL, "query_start_loc", wanted[0], torch.int32)[: requests + 1]
            slots = contiguous(KERNEL, "slots", wanted[1], torch.int32)[:requests]
        else:
            starts, slots = self._starts[: requests + 1], self._slots[:requests]
        check_starts(KERNEL, starts, rows)
        states = self._carried.state.shape[0]
        bad = _bad_slot(slots, states)
        if bad >= 0:
            if not 0 <= slots[bad] < states:
                problem = f"is {slots[bad]}, and there are {states} slots"
                raise BadIndex(KERNEL, f"slots[{bad}]", problem)
            raise BadMetadata(KERNEL, f"slots[{bad}]", f"is {slots[bad]}, as of an earlier request")
        return starts, slots

    def _torch(self, requests: int, rows: int) -> None:
        u, c, out = (buffer.detach()[:rows] for buffer in self._buffers)
        conv, carried = self._conv, self._carried
        wide = Carried(
            carried.state.float(),
            carried.slots[:requests],
            carried.query_start_loc[: requests + 1],
        )
        out.copy_(reference(conv._taps.float(), conv.dilation, u.float(), c.float(), carried=wide))
        carried.state.copy_(wide.state)


def reference(
    weight: torch.Tensor, dilation: int, u: torch.Tensor, c: torch.Tensor, *, carried: Carried
) -> torch.Tensor:
    """The same in plain torch, in the inputs' dtype, one request after the other; the state moves on.

    `weight` [S * H, K].
    """
    out = torch.zeros_like(u)
    state = carried.state
    spans = pairwise(carried.query_start_loc.tolist())
    for slot, (lo, hi) in zip(carried.slots.tolist(), spans, strict=True):
        if slot == NULL_SLOT or lo == hi:
            continue
        seen = torch.cat([state[slot], c[lo:hi]])
        mixed = torch.nn.functional.conv1d(
            seen.t()[None], weight.to(u.dtype)[:, None, :], groups=len(weight), dilation=dilation
        )
        out[lo:hi] = u[lo:hi] + torch.nn.functional.silu(mixed[0].t())
        state[slot] = seen[len(seen) - state.shape[1] :]
    return out


@kernel
def _bad_slot(slots: Array, count: int) -> int:
    """The first request whose slot does not exist or is already taken by an earlier one, or -1."""
    taken = np.zeros(count, dtype=np.bool_)
    for request in range(len(slots)):
        slot = slots[request]
        if slot == NULL_SLOT:
            continue
        if slot < 0 or slot >= count or taken[slot]:
            return request
        taken[slot] = True
    return -1


@inlined
def _add_tap(total: Array, row: Array, weight: Array) -> None:
    for j in range(len(total)):
        total[j] += load(row, j) * weight[j]


@inlined
def _finish(total: Array, u: Array, out: Array) -> None:
    for j in range(len(total)):
        store(out, j, load(u, j) + silu32(total[j]))


@kernel
def _convolve(  # noqa: PLR0913, PLR0917
    u: Array,
    u_stride: int,
    c: Array,
    c_stride: int,
    starts: Array,
    slots: Array,
    state: Array,
    weight: Array,
    dilation: int,
    out: Array,
    out_stride: int,
    lo: int,
    hi: int,
) -> None:
    taps, channels = weight.shape
    history = state.shape[1]
    totals = np.empty(min(_BLOCK, channels), dtype=np.float32)
    request = 0
    for t in range(lo, hi):
        while request < len(slots) and t >= starts[request + 1]:
            request += 1
        if request == len(slots) or slots[request] == NULL_SLOT:
            out[t * out_stride : t * out_stride + channels] = 0
            continue
        for first in range(0, channels, _BLOCK):
            end = min(first + _BLOCK, channels)
            total = totals[: end - first]
            total[:] = 0
            for tap in range(taps):
                place = t - starts[request] - (taps - 1 - tap) * dilation
                if place >= 0:
                    at = (starts[request] + place) * c_stride
                    _add_tap(total, c[at + first : at + end], weight[tap, first:end])
                else:
                    kept = state[slots[request], history + place]
                    _add_tap(total, kept[first:end], weight[tap, first:end])
            at = t * u_stride
            to = t * out_stride
            _finish(total, u[at + first : at + end], out[to + first : to + end])


@kernel
def _remember(c: Array, c_stride: int, starts: Array, slots: Array, state: Array) -> None:  # noqa: PLR0917
    """The last rows of each request into its slot, oldest first."""
    history, channels = state.shape[1], state.shape[2]
    for request in range(len(slots)):
        if slots[request] == NULL_SLOT:
            continue
        kept = state[slots[request]]
        lo, hi = starts[request], starts[request + 1]
        for place in range(history if hi > lo else 0):
            source = hi - history + place
            if source >= lo:
                kept[place, :] = c[source * c_stride : source * c_stride + channels]
            else:  # upwards: reads only rows that were not written yet
                kept[place, :] = kept[place + hi - lo, :]


@warmup.of(PleConvSpec)
def tasks(spec: PleConvSpec, shapes: warmup.Shapes) -> Iterable[warmup.Task]:  # noqa: ARG001
    """A request in the null slot: the kernels know a dtype and no shapes."""

    def run() -> None:
        conv = Conv(torch.zeros(spec.channels, spec.taps), spec.dilation)
        rows = torch.zeros(1, spec.channels, dtype=spec.dtype)
        conv(rows, rows.clone(), null_batch(conv.new_state(1, spec.dtype), 1))

    yield warmup.Task(f"{KERNEL} {str(spec.dtype).removeprefix('torch.')}", run)
