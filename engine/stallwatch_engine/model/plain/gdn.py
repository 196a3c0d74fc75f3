"""GatedDeltaNet in torch, one request after the other."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from stallwatch_engine.checkpoint.config import ModelConfig
from stallwatch_engine.checkpoint.weights import GdnWeights
from stallwatch_engine.model.plain.step import Step
from stallwatch_engine.state.stores import GdnStore
from stallwatch_kernels.gdn.reference import Heads, causal_conv, delta_rule, gates
from stallwatch_kernels.norm.reference import gated_rms_norm


def gdn(
    config: ModelConfig, weights: GdnWeights, store: GdnStore, step: Step, *, x: torch.Tensor
) -> torch.Tensor:
    """[T, H] from x [T, H]; the states move on."""
    sizes = config.gdn
    heads = Heads(sizes.key_heads, sizes.value_heads, sizes.key_dim, sizes.value_dim)
    qkv, z = linear(x, weights.in_qkv), linear(x, weights.in_z)
    a, b = linear(x, weights.in_a), linear(x, weights.in_b)
    out = x.new_zeros(step.tokens, sizes.values)
    for span in step.spans:
        rows = slice(span.lo, span.hi)
        mixed, store.conv[span.slot] = causal_conv(qkv[rows], weights.conv, store.conv[span.slot])
        decay, beta = gates(a[rows], b[rows], weights.a_log, weights.dt_bias)
        out[rows], store.recurrent[span.slot] = delta_rule(
            mixed, decay, beta, store.recurrent[span.slot], heads
        )
    gated = gated_rms_norm(out, z, weights.norm, config.eps, activation=sizes.gate)
    return linear(gated, weights.out)
