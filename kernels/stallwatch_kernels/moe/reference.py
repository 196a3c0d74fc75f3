"""Routed experts in plain torch, one expert at a time: what the compiled passes are measured against."""

from __future__ import annotations

import torch


def routed_reference(  # noqa: PLR0917
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    """Shapes: x [T, H]; ids, weights [T, top_k]; w13 [E, 2 I, H]; w2 [E, H, I]; floats of one type. Returns [T, H]."""
    rows = x.new_zeros((*ids.shape, x.shape[1]))
    for expert in torch.unique(ids).tolist():
        token, slot = torch.nonzero(ids == expert, as_tuple=True)
        gate, up = (x[token] @ w13[expert].T).chunk(2, -1)
        rows[token, slot] = (torch.nn.functional.silu(gate) * up) @ w2[expert].T
    return (rows * weights[..., None]).sum(1)
