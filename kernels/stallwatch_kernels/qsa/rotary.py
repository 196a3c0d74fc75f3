"""Rotary positions and RMS norms of queries and keys, shared by attention, indexer and engine.

Text positions only: with equal temporal, height and width positions the interleaved multi-axis rotary of
Qwen4-Exp is the plain one.
"""

from __future__ import annotations

import numpy as np
import torch

from stallwatch_kernels.errors import BadShape
from stallwatch_kernels.jit import kernel, reduction
from stallwatch_kernels.tensors import Array, check_eps, contiguous


class Rotary:
    """cos and sin of every position up to `positions`, computed once: a row's angle cannot depend on how
    many rows were asked for. `rotated` is the leading part of a head that turns (even).
    """

    def __init__(self, rotated: int, theta: float, positions: int) -> None:
        if rotated <= 0 or rotated % 2 or positions <= 0:
            raise BadShape("rotary", "rotated", f"is {rotated} over {positions} positions")
        powers = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
        angles = torch.arange(positions, dtype=torch.float32)[:, None] * (1.0 / theta**powers)
        angles = torch.cat((angles, angles), -1)
        self.cos, self.sin = angles.cos(), angles.sin()

    def at(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin `[n, rotated]` of integer positions `[n]`; positions of padding rows are clamped."""
        inside = positions.long().clamp(0, self.cos.shape[0] - 1)
        return self.cos[inside].to(dtype), self.sin[inside].to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The leading part of `x [n, heads, d]` turned by cos, sin `[n, rotated]`; the rest unchanged."""
    rotated = cos.shape[-1]
    if rotated > x.shape[-1] or cos.shape[0] != x.shape[0]:
        raise BadShape("rotary", "cos", f"is {tuple(cos.shape)} for x {tuple(x.shape)}")
    turning, rest = x[..., :rotated], x[..., rotated:]
    half = rotated // 2
    swapped = torch.cat((-turning[..., half:], turning[..., :half]), -1)
    return torch.cat((turning * cos[:, None] + swapped * sin[:, None], rest), -1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """X / rms(x) * (1 + weight) over the last axis, in float32, then cast to x's type."""
    size = x.shape[-1]
    if weight.shape != (size,):
        raise BadShape("rms_norm", "weight", f"is {tuple(weight.shape)}; expected [{size}]")
    rows = x.float().contiguous()
    out = torch.empty_like(rows)
    _rms_norm(
        contiguous("rms_norm", "x", rows, torch.float32).reshape(-1, size),
        weight.detach().float().contiguous().numpy(),
        float(check_eps("rms_norm", eps)),
        out.numpy().reshape(-1, size),
    )
    return out.to(x.dtype)


@reduction
def _square_sum(row: Array) -> np.float32:
    total = np.float32(0.0)
    for value in row:
        total += value * value
    return total


@kernel
def _rms_norm(x: Array, weight: Array, eps: float, out: Array) -> None:
    size = x.shape[1]
    for i in range(x.shape[0]):
        mean = _square_sum(x[i]) / np.float32(size)
        factor = np.float32(1.0) / np.sqrt(mean + np.float32(eps))
        for d in range(size):
            out[i, d] = x[i, d] * factor * (np.float32(1.0) + weight[d])
