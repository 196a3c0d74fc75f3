"""Convolution and gated delta rule in torch, one request, token after token.

Computed in float64 if the input is float64, else in float32, and rounded once to the input's type.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from stallwatch_kernels.norm.reference import wide

L2_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Heads:
    """Key heads, value heads (a multiple), and the sizes of their vectors."""

    keys: int
    values: int
    key_size: int
    value_size: int

    @property
    def width(self) -> int:
        """Elements of one row q | k | v."""
        return 2 * self.keys * self.key_size + self.values * self.value_size


def causal_conv(
    x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The silu of the depthwise convolution over the past: x [T, C], weight [C, K], state [K-1, C], oldest first.

    Returns the output [T, C] and the next state.
    """
    taps = weight.shape[1]
    past = torch.cat([wide(state), wide(x)])
    tokens, kernel = x.shape[0], weight.to(past.dtype).t()
    out = torch.stack([past[tap : tap + tokens] * kernel[tap] for tap in range(taps)]).sum(0)
    return functional.silu(out).to(x.dtype), past[-(taps - 1) :].to(state.dtype)


def gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The decay exp(-exp(A_log) softplus(a + dt_bias)) and the write strength sigmoid(b), both [T, Hv]."""
    rate = a_log.to(wide(a).dtype).exp()
    decay = torch.exp(-rate * functional.softplus(wide(a) + dt_bias.to(rate.dtype)))
    return decay, torch.sigmoid(wide(b))


def delta_rule(  # noqa: PLR0917
    qkv: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor, heads: Heads
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence on state [Hv, dk, dv] for rows q | k | v: S = S decay; S += k (v - k S) beta; o = q S.

    q and k are L2-normalised, q also divided by sqrt(dk). Returns the output [T, Hv * dv] and the next state.
    """
    q, k, v = _split(wide(qkv), heads)
    state = state.to(q.dtype).clone()
    outputs = []
    for t in range(qkv.shape[0]):
        state *= decay[t, :, None, None]
        held = torch.einsum("hkv,hk->hv", state, k[t])
        state += torch.einsum("hk,hv->hkv", k[t], (v[t] - held) * beta[t, :, None])
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]).flatten())
    empty = qkv.new_empty(0, heads.values * heads.value_size)
    return (torch.stack(outputs).to(qkv.dtype) if outputs else empty), state


def _split(qkv: torch.Tensor, heads: Heads) -> tuple[torch.Tensor, ...]:
    keys = heads.keys * heads.key_size
    q, k, v = qkv.split([keys, keys, heads.values * heads.value_size], -1)
    times = heads.values // heads.keys

    def normed(x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(-1, (heads.keys, heads.key_size))
        x = x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + L2_EPS)
        return x.repeat_interleave(times, 1)

    scale = heads.key_size**-0.5
    return normed(q) * scale, normed(k), v.unflatten(-1, (heads.values, heads.value_size))
