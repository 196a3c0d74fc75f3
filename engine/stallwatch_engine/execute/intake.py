"""How a step's host arrays get into the static buffers, and what the step before sampled with them."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from stallwatch_engine.execute.host import HostStep
from stallwatch_engine.execute.ring import SampledRing
from stallwatch_engine.model.buffers import StepBuffers
from stallwatch_engine.state.context import TokenContext
from stallwatch_kernels.jit import kernel
from stallwatch_kernels.tensors import Array


class Intake(Protocol):
    """Called on the model stream, once a step. The context moves on with the step's ids."""

    def __call__(self, step: HostStep) -> None: ...


class HostIntake:
    """On a CPU: arrays over the same memory, assigned in place."""

    def __init__(
        self, buffers: StepBuffers, ring: SampledRing, context: TokenContext | None
    ) -> None:
        self._ids, self._positions = buffers.ids.numpy(), buffers.positions.numpy()
        self._owner, self._starts = buffers.owner.numpy(), buffers.starts.numpy()
        self._slots, self._seq_lens = buffers.slots.numpy(), buffers.seq_lens.numpy()
        self._sampled, self._before = buffers.sampled.numpy(), buffers.context.numpy()
        self._ring, self._steps = ring.ids.numpy(), len(ring.ids)
        self._context = None if context is None else context.ids.numpy()

    def __call__(self, step: HostStep) -> None:
        tokens, requests = step.tokens, step.requests
        ids = self._ids[:tokens]
        ids[:] = step.ids
        for feed in step.feeds:
            ids[feed.index] = self._ring[feed.step % self._steps][feed.samples]
        self._positions[:tokens] = step.positions
        self._owner[:tokens] = step.owner
        self._starts[: requests + 1] = step.starts
        self._slots[:requests] = step.slots
        self._seq_lens[step.slots] = step.seq_lens
        self._sampled[: step.samples] = step.sampled
        if self._context is not None:
            advance(self._context, step.slots, step.starts, ids, self._before)


@kernel
def advance(context: Array, slots: Array, starts: Array, ids: Array, before: Array) -> None:  # noqa: PLR0917
    """To `before` [R, n - 1]: each request's last ids; then to its row of `context`, with the step's appended."""
    older = context.shape[1]
    for r in range(slots.shape[0]):
        row = context[slots[r]]
        for place in range(older):
            before[r, place] = row[place]
        many = starts[r + 1] - starts[r]
        for place in range(older):
            at = many + place - older  # the place of the new last ids among the step's
            row[place] = ids[starts[r] + at] if at >= 0 else before[r, place + many]


def warm_advance(older: int) -> None:
    """Compile `advance`: a dummy step asks no n-gram table and would not come to it."""
    none, start = np.empty(0, np.int32), np.zeros(1, np.int32)
    advance(np.zeros((1, older), np.int32), none, start, none, np.empty((0, older), np.int32))


class DeviceIntake:
    """On an accelerator: copies in the order of the current stream."""

    def __init__(
        self, buffers: StepBuffers, ring: SampledRing, context: TokenContext | None
    ) -> None:
        self._buffers, self._ring, self._context = buffers, ring, context
        self._device = buffers.ids.device

    def __call__(self, step: HostStep) -> None:
        buffers, tokens, requests = self._buffers, step.tokens, step.requests
        buffers.ids[:tokens] = self._there(step.ids)
        for feed in step.feeds:
            sampled = self._ring.ids_of(feed.step)[self._there(feed.samples)]
            buffers.ids[self._there(feed.index)] = sampled
        buffers.positions[:tokens] = self._there(step.positions)
        buffers.owner[:tokens] = self._there(step.owner)
        buffers.starts[: requests + 1] = self._there(step.starts)
        slots = self._there(step.slots)
        buffers.slots[:requests] = slots
        wide = slots.to(torch.int64)
        buffers.seq_lens[wide] = self._there(step.seq_lens)
        buffers.sampled[: step.samples] = self._there(step.sampled)
        if self._context is not None:
            self._context.rows(wide, buffers.context[:requests])
            starts = buffers.starts[: requests + 1]
            self._context.advance(wide, starts, buffers.ids[:tokens])

    def _there(self, array: Array) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def open_intake(buffers: StepBuffers, ring: SampledRing, context: TokenContext | None) -> Intake:
    """The one for the device of the buffers."""
    kind = HostIntake if buffers.ids.device.type == "cpu" else DeviceIntake
    return kind(buffers, ring, context)
