"""A step as plain blocks read it: which tokens are whose, on the host and on the device."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from stallwatch_engine.model.buffers import StepBuffers
from stallwatch_engine.state.pages import NULL


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `lo` to `hi` of a step belong to the request in `slot`; they begin at position `first`."""

    slot: int
    lo: int
    hi: int
    first: int

    @property
    def length(self) -> int:
        """Tokens of the request, this step's included."""
        return self.first + self.hi - self.lo


@dataclass(frozen=True, slots=True)
class Step:
    """Rows of padding belong to no span."""

    tokens: int
    spans: tuple[Span, ...]
    positions: torch.Tensor  # int64[T]
    slots: torch.Tensor  # int32[R]
    starts: torch.Tensor  # int32[R + 1]

    @classmethod
    def of(cls, inputs: StepBuffers, tokens: int, requests: int) -> Step:
        """The step in the buffers. Waits for the device: the spans are needed on the host."""
        slots, starts = inputs.slots[:requests], inputs.starts[: requests + 1]
        positions = inputs.positions[:tokens].to(torch.int64)
        bounds = list(pairwise(starts.tolist()))
        spans = tuple(
            Span(slot, lo, hi, int(positions[lo]))
            for slot, (lo, hi) in zip(slots.tolist(), bounds, strict=True)
            if slot != NULL and hi > lo
        )
        return cls(tokens, spans, positions, slots, starts)
