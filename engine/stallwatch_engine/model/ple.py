"""The PLE layer: keys and values of the n-gram rows, the gate, the dilated convolution, added to the streams."""

from __future__ import annotations

import torch

from stallwatch_engine.checkpoint.config import ModelConfig
from stallwatch_engine.checkpoint.weights import PleWeights
from stallwatch_engine.model.buffers import Activations, Run, StepBuffers
from stallwatch_engine.state.stores import GdnStore
from stallwatch_kernels.gdn.batch import Carried
from stallwatch_kernels.linear.skinny import Linear
from stallwatch_kernels.ple.conv import Conv
from stallwatch_kernels.ple.gate import Gate, GateWeights
from stallwatch_kernels.pool import RowPool


class PleScratch:
    """Buffers between the kernels, shared by all PLE layers."""

    def __init__(self, config: ModelConfig, tokens: int, dtype: torch.dtype) -> None:
        wide = config.residual
        self.merged = torch.zeros(tokens, wide + config.hidden, dtype=dtype)
        self.u = torch.zeros(tokens, wide, dtype=dtype)
        self.c = torch.zeros(tokens, wide, dtype=dtype)


def bind_ple(  # noqa: PLR0917
    config: ModelConfig,
    weights: PleWeights,
    store: GdnStore,
    inputs: StepBuffers,
    act: Activations,
    scratch: PleScratch,
    *,
    ordinal: int,
    pool: RowPool,
) -> Run:
    """Adds: h += PLE(h, rows of PLE layer `ordinal`)."""
    assert config.ple is not None
    assert store.ple_conv is not None
    wide = config.residual
    merged = torch.cat([weights.key, weights.value])
    project = Linear(merged, pool=pool).bind(act.ple[ordinal], scratch.merged)
    norms = GateWeights(
        weights.norm_key,
        weights.norm_query,
        weights.norm_conv,
        config.hyper.streams,
        config.eps,
    )
    gate = Gate(norms, pool).bind(
        scratch.merged[:, :wide], scratch.merged[:, wide:], act.h, u=scratch.u, c=scratch.c
    )
    carried = Carried(store.ple_conv, inputs.slots, inputs.starts)
    conv = Conv(weights.conv, config.ple.numbers.ngram_size, pool).bind(
        scratch.u, scratch.c, carried, scratch.u
    )

    def run(tokens: int, requests: int) -> None:
        project(tokens)
        gate(tokens, tokens)
        conv(requests, tokens)
        act.h[:tokens] += scratch.u[:tokens]

    return run
