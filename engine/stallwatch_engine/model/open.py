"""Which forward pass runs: compiled kernels on a CPU, torch's elsewhere; STALLWATCH_KERNEL_FORWARD overrides."""

from __future__ import annotations

from typing import Protocol

import torch

from stallwatch_engine.checkpoint.weights import ModelWeights
from stallwatch_engine.model.buffers import StepBuffers
from stallwatch_engine.model.forward import Forward
from stallwatch_engine.model.plain.forward import PlainForward
from stallwatch_engine.state.stores import StateStores
from stallwatch_kernels.admission import Candidate, choose
from stallwatch_kernels.pool import SERIAL, RowPool

OP = "forward"


class AnyForward(Protocol):
    """A step in two parts; between them its n-gram rows are put into `rows` [L, T, E]."""

    @property
    def rows(self) -> torch.Tensor: ...

    def begin(self, tokens: int, requests: int) -> None: ...

    def finish(self, tokens: int, requests: int, samples: int, /) -> torch.Tensor: ...


def candidates(device: torch.device) -> list[Candidate]:
    """The compiled one first."""
    return [
        ("compiled", None if device.type == "cpu" else "its kernels run on the CPU"),
        ("torch", None),
    ]


def open_forward(
    weights: ModelWeights,
    stores: StateStores,
    inputs: StepBuffers,
    *,
    pool: RowPool = SERIAL,
) -> AnyForward:
    """The forward pass for the device that the stores are on."""
    if choose(OP, candidates(weights.embed.device)).impl == "compiled":
        return Forward(weights, stores, inputs, pool=pool)
    return PlainForward(weights, stores, inputs)
