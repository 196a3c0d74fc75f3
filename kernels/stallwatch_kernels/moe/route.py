"""The router: which experts a token goes to, and with what weights."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from stallwatch_kernels.errors import BadLayout, BadShape
from stallwatch_kernels.jit import kernel
from stallwatch_kernels.tensors import Array, apart, array, check_rows, contiguous

_OP = "moe-route"


def route_reference(
    logits: torch.Tensor, top_k: int, *, renormalise: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in torch: a stable descending sort puts the lower of two equal experts first."""
    probabilities = torch.softmax(logits.float(), -1)
    ordered = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    weights, experts = ordered.values[:, :top_k], ordered.indices[:, :top_k]
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype), experts.to(torch.int32)


def route(
    logits: torch.Tensor, top_k: int, *, renormalise: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over all experts in float32, the largest `top_k`, renormalised, cast to the logits' type.

    logits [T, E] float32 or bfloat16. Returns weights [T, top_k], best first, and experts int32 [T, top_k].
    Of equal probabilities the lower expert comes first. A row with a NaN has NaN weights, and experts in range.
    """
    logits = logits.detach()
    if logits.ndim != 2 or not 1 <= top_k <= logits.shape[1]:
        raise BadShape(_OP, "logits", f"are {tuple(logits.shape)} for top {top_k}; expected [T, E]")
    array(_OP, "logits", logits, torch.float32, torch.bfloat16)
    if logits.shape[0] > 1 and logits.stride(1) != 1:
        raise BadLayout(_OP, "logits", f"have strides {logits.stride()}; expected adjacent experts")
    source = logits.float().contiguous().numpy()  # one layout, so that one signature serves all
    tokens = logits.shape[0]
    weights = torch.empty((tokens, top_k), dtype=torch.float32)
    experts = torch.empty((tokens, top_k), dtype=torch.int32)
    if tokens:
        _route(source, renormalise, weights.numpy(), experts.numpy())
    return weights.to(logits.dtype), experts


def bind_route(
    logits: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, *, renormalise: bool
) -> Callable[[int], None]:
    """The same between static float32 logits [T, E], weights [T, top_k] and int32 experts; a call takes the rows."""
    top_k = weights.shape[-1]
    if (
        {logits.ndim, weights.ndim} != {2}
        or weights.shape != experts.shape
        or not 1 <= top_k <= logits.shape[-1]
    ):
        raise BadShape(_OP, "weights", f"are {tuple(weights.shape)}, ids {tuple(experts.shape)}")
    source = contiguous(_OP, "logits", logits, torch.float32)
    shares = contiguous(_OP, "weights", weights, torch.float32)
    ids = contiguous(_OP, "experts", experts, torch.int32)
    apart(_OP, ("weights", "logits"), weights, logits)
    apart(_OP, ("experts", "logits"), experts, logits)
    apart(_OP, ("experts", "weights"), experts, weights)
    most = min(len(logits), len(weights))

    def run(rows: int) -> None:
        check_rows(_OP, rows, most)
        _route(source[:rows], renormalise, shares[:rows], ids[:rows])

    return run


@kernel
def _route(logits: Array, renormalise: bool, weights: Array, experts: Array) -> None:
    count = logits.shape[1]
    chosen = weights.shape[1]
    probabilities = np.empty(count, np.float32)
    for row in range(logits.shape[0]):
        top = logits[row, 0]
        for e in range(1, count):
            top = max(top, logits[row, e])
        total = 0.0
        for e in range(count):
            probabilities[e] = np.exp(np.float32(logits[row, e] - top))
            total += probabilities[e]
        found = 0
        for e in range(count):
            p = np.float32(probabilities[e] / total)
            key = p if p == p else np.float32(-1.0)  # noqa: PLR0124 - a NaN must not end the search
            if found < chosen:
                at = found
                found += 1
            elif key > weights[row, chosen - 1]:
                at = chosen - 1
            else:
                continue
            while at > 0 and key > weights[row, at - 1]:
                weights[row, at] = weights[row, at - 1]
                experts[row, at] = experts[row, at - 1]
                at -= 1
            weights[row, at] = key
            experts[row, at] = e
        kept = 0.0
        for slot in range(chosen):
            kept += weights[row, slot]
        if not total > 0.0:  # a NaN among the logits
            weights[row, :] = np.float32(np.nan)
        elif renormalise:
            for slot in range(chosen):
                weights[row, slot] = np.float32(weights[row, slot] / kept)
