"""GatedDeltaNet: one merged projection, convolution, gated delta rule, gated norm, output projection."""

from __future__ import annotations

import torch

from stallwatch_engine.checkpoint.config import ModelConfig
from stallwatch_engine.checkpoint.weights import GdnWeights
from stallwatch_engine.model.buffers import Activations, Run, StepBuffers
from stallwatch_engine.state.stores import GdnStore
from stallwatch_kernels.gdn.batch import Carried
from stallwatch_kernels.gdn.conv import CausalConv
from stallwatch_kernels.gdn.recurrence import GatedDeltaRule, Inputs
from stallwatch_kernels.gdn.reference import Heads
from stallwatch_kernels.linear.skinny import Linear
from stallwatch_kernels.norm.rms import GatedRmsNorm
from stallwatch_kernels.pool import RowPool


class GdnScratch:
    """Buffers between the kernels; layers run one after the other and share them."""

    def __init__(self, config: ModelConfig, tokens: int, dtype: torch.dtype) -> None:
        gdn = config.gdn
        width = gdn.channels + gdn.values + 2 * gdn.value_heads
        self.merged = torch.zeros(tokens, width, dtype=dtype)
        cuts = [gdn.channels, gdn.values, gdn.value_heads, gdn.value_heads]
        self.qkv, self.z, self.a, self.b = self.merged.split(cuts, dim=1)
        self.mixed = torch.zeros(tokens, gdn.channels, dtype=dtype)
        self.out = torch.zeros(tokens, gdn.values, dtype=dtype)


def bind_gdn(  # noqa: PLR0917
    config: ModelConfig,
    weights: GdnWeights,
    store: GdnStore,
    inputs: StepBuffers,
    act: Activations,
    scratch: GdnScratch,
    *,
    pool: RowPool,
) -> Run:
    """Sets y = GatedDeltaNet(x)."""
    gdn = config.gdn
    merged = torch.cat([weights.in_qkv, weights.in_z, weights.in_a, weights.in_b])
    project = Linear(merged, pool=pool).bind(act.x, scratch.merged)
    conv = CausalConv(weights.conv, pool).bind(
        scratch.qkv, scratch.mixed, Carried(store.conv, inputs.slots, inputs.starts)
    )
    heads = Heads(gdn.key_heads, gdn.value_heads, gdn.key_dim, gdn.value_dim)
    rule = GatedDeltaRule(heads, weights.a_log, weights.dt_bias, pool).bind(
        Inputs(scratch.mixed, scratch.a, scratch.b),
        scratch.out,
        Carried(store.recurrent, inputs.slots, inputs.starts),
    )
    norm = GatedRmsNorm(weights.norm, config.eps, pool, gdn.gate)
    gate = norm.bind(scratch.out, scratch.z, scratch.out)
    project_out = Linear(weights.out, pool=pool).bind(scratch.out, act.y)

    def run(tokens: int, requests: int) -> None:
        project(tokens)
        conv(requests)
        rule(requests)
        gate(tokens)
        project_out(tokens)

    return run
