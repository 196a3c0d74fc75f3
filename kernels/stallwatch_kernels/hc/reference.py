"""Hyper-connections in torch: float64 if the input is float64, else float32, rounded once to the input's type."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stallwatch_kernels.norm.reference import rms_norm, wide


@dataclass(frozen=True, slots=True)
class Weights:
    """down [r, S*H], up [S*H, r], norm [S*H], inject [S, S*H] or None for the final fold; S streams."""

    down: torch.Tensor
    up: torch.Tensor
    norm: torch.Tensor
    inject: torch.Tensor | None
    streams: int
    eps: float


def read(h: torch.Tensor, weights: Weights) -> tuple[torch.Tensor, torch.Tensor | None]:
    """X = mean over streams of sigmoid(U silu(D n / S)) n with n = groupRMS(h), and 2 sigmoid(W n / S).

    h [rows, S*H] -> x [rows, H], injection [rows, S] (None for the final fold).
    """
    streams = weights.streams
    normed = rms_norm(wide(h), weights.norm, weights.eps, h.shape[-1] // streams)
    kind = normed.dtype
    low = torch.nn.functional.silu(normed @ weights.down.to(kind).t() / streams)
    mix = torch.sigmoid(low @ weights.up.to(kind).t()) * normed
    x = mix.unflatten(-1, (streams, -1)).mean(-2).to(h.dtype)
    if weights.inject is None:
        return x, None
    return x, 2 * torch.sigmoid(normed @ weights.inject.to(kind).t() / streams)


def write(h: torch.Tensor, y: torch.Tensor, injection: torch.Tensor) -> torch.Tensor:
    """h_s + injection_s y for each stream s: h [rows, S*H], y [rows, H], injection [rows, S]."""
    added = injection.to(wide(h).dtype)[..., None] * wide(y)[..., None, :]
    return (wide(h) + added.flatten(-2)).to(h.dtype)
