"""The norms in torch: what the fast paths are measured and judged against.

Computed in float64 if the input is float64, else in float32, and rounded once to the input's type.
"""

from __future__ import annotations

import torch


def wide(x: torch.Tensor) -> torch.Tensor:
    """The tensor in the type that a reference computes in."""
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, group: int | None = None
) -> torch.Tensor:
    """X / rms(x) * (1 + weight) over the last dimension, or over each `group` of it. weight: [width]."""
    values = wide(x).unflatten(-1, (-1, group or x.shape[-1]))
    normed = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
    return (normed.flatten(-2) * (1.0 + weight.to(values.dtype))).to(x.dtype)


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    activation: str = "silu",
) -> torch.Tensor:
    """X / rms(x) * weight * silu(gate), or sigmoid(gate) in its place, over each group of `weight`'s width. x, gate: [rows, groups * width]."""
    values = wide(x).unflatten(-1, (-1, weight.shape[0]))
    normed = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
    weighted = (normed * weight.to(values.dtype)).flatten(-2)
    bent = torch.sigmoid if activation == "sigmoid" else torch.nn.functional.silu
    return (weighted * bent(gate.to(values.dtype))).to(x.dtype)
