"""Router, routed experts and the gated shared expert. Sums are float32, rounded once at the end."""

from __future__ import annotations

import torch

from stallwatch_engine.checkpoint.config import ModelConfig
from stallwatch_engine.checkpoint.weights import MoeWeights
from stallwatch_engine.model.buffers import Activations, Run
from stallwatch_kernels.linear.skinny import Linear
from stallwatch_kernels.moe.experts import RoutedExperts
from stallwatch_kernels.moe.route import bind_route
from stallwatch_kernels.moe.shared import SharedExpert
from stallwatch_kernels.moe.weights import ExpertWeights
from stallwatch_kernels.pool import RowPool


class MoeScratch:
    """Buffers between the kernels, shared by all layers. In float32 `wide` and `total` are x and y."""

    def __init__(self, config: ModelConfig, act: Activations) -> None:
        moe, tokens = config.moe, len(act.x)
        plain = act.x.dtype == torch.float32
        self.wide = act.x if plain else act.x.float()
        self.total = act.y if plain else act.y.float()
        self.logits = torch.zeros(tokens, moe.experts)
        self.shares = torch.zeros(tokens, moe.top_k)
        self.experts = torch.zeros(tokens, moe.top_k, dtype=torch.int32)


def bind_moe(
    config: ModelConfig,
    weights: MoeWeights,
    act: Activations,
    scratch: MoeScratch,
    *,
    pool: RowPool,
) -> Run:
    """Sets y = experts(x) + sigmoid(gate x) shared(x)."""
    moe = config.moe
    router = Linear(weights.router, pool=pool).bind(scratch.wide, scratch.logits)
    route = bind_route(scratch.logits, scratch.shares, scratch.experts, renormalise=moe.renormalise)
    stacks = ExpertWeights.dense(weights.gate_up, weights.down)
    routed = RoutedExperts(stacks, moe.top_k, pool=pool).bind(
        scratch.wide, scratch.experts, scratch.shares, scratch.total
    )
    parts = weights.shared_gate_up, weights.shared_down, weights.shared_scale
    shared = SharedExpert(*(Linear(part, pool=pool) for part in parts)).bind(
        scratch.total, scratch.wide
    )
    plain = scratch.wide is act.x

    def run(tokens: int, _requests: int) -> None:
        if not plain:
            scratch.wide[:tokens] = act.x[:tokens]
        router(tokens)
        route(tokens)
        routed(tokens)
        shared(tokens)
        if not plain:
            act.y[:tokens] = scratch.total[:tokens]

    return run
