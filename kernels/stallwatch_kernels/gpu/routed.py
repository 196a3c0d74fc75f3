"""NVFP4 experts on the device: a tile of routed rows of one expert against a strip of that expert's rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl

from stallwatch_kernels.errors import BadDtype, BadMetadata, BadShape
from stallwatch_kernels.gpu.scalar import cast, e2m1, e4m3, jit, product, same_device
from stallwatch_kernels.moe.layout import Groups, check_groups
from stallwatch_kernels.nvfp4.codec import GROUP, Packed

KERNEL = "nvfp4-triton"
_ROWS, _COLUMNS, _DEPTH = 16, 32, 64


def routed_gemm(
    x: torch.Tensor, weights: Packed, groups: Groups, *, top_k: int = 1, parts: int = 1
) -> torch.Tensor:
    """y[i] = W[expert of i] x[i // top_k] for every routed row i: x [T, K] -> [T * top_k, N] in x's type.

    codes [E, N, K/2], scales [E, N, K/16], global scale [E] or [E, parts] (equal parts of N). Both layouts of
    `moe.layout`; sums in float32. Raises KernelRefused.
    """
    codes, scales = weights.codes, weights.scales
    same_device(KERNEL, {"x": x, "codes": codes, "scales": scales, "globals": weights.global_scale})
    experts, n, k = codes.shape[0], codes.shape[1], codes.shape[2] * 2
    if x.ndim != 2 or x.shape[1] != k or not x.is_contiguous():
        raise BadShape(KERNEL, "x", f"is {tuple(x.shape)}; expected contiguous [T, {k}]")
    if x.dtype not in {torch.float32, torch.float16, torch.bfloat16}:
        raise BadDtype(KERNEL, "x", f"is {x.dtype}; expected a float type")
    if scales.shape != (experts, n, k // GROUP) or n % parts:
        raise BadShape(
            KERNEL, "scales", f"are {tuple(scales.shape)} for codes {tuple(codes.shape)}"
        )
    if weights.global_scale.numel() != experts * parts:
        raise BadMetadata(KERNEL, "global_scale", f"is not [{experts}, {parts}]")
    routed = x.shape[0] * top_k
    check_groups(groups, routed, experts)
    out = torch.empty(routed, n, dtype=x.dtype, device=x.device)
    if not routed:
        return out
    first, last, expert = (torch.from_numpy(a).to(x.device) for a in tiles(groups))
    routed_tile[(first.numel(), -(-n // _COLUMNS))](
        x,
        codes.contiguous(),
        scales.contiguous().view(torch.uint8),
        weights.global_scale.float().contiguous(),
        torch.from_numpy(groups.order).to(x.device),
        first,
        last,
        expert,
        out,
        n,
        k,
        top_k,
        n // parts,
        parts,
        M=_ROWS,
        N=_COLUMNS,
        K=_DEPTH,
    )
    return out


def tiles(groups: Groups) -> tuple[Any, Any, Any]:
    """Groups cut into tiles of at most 16 places: first and last place, and the expert, int32 each."""
    lengths = np.diff(groups.offsets)
    count = -(-lengths // _ROWS)
    group = np.repeat(np.arange(len(lengths)), count)
    within = np.arange(len(group)) - np.repeat(np.cumsum(count) - count, count)
    first = groups.offsets[group] + within * _ROWS
    last = np.minimum(first + _ROWS, groups.offsets[group + 1])
    return tuple(a.astype(np.int32) for a in (first, last, groups.experts[group]))  # type: ignore[return-value]


@jit
def routed_tile(  # noqa: PLR0913, PLR0917
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    factors: tl.tensor,
    order: tl.tensor,
    firsts: tl.tensor,
    lasts: tl.tensor,
    experts: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    top_k: tl.tensor,
    part: tl.tensor,
    parts: tl.tensor,
    M: tl.constexpr,  # noqa: N803
    N: tl.constexpr,  # noqa: N803
    K: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """One tile of rows, one strip of columns."""
    tile = tl.program_id(0)
    expert = tl.load(experts + tile).to(tl.int64)
    place = tl.load(firsts + tile) + tl.arange(0, M)
    taken = place < tl.load(lasts + tile)
    routed = tl.load(order + place, mask=taken, other=0)
    column = tl.program_id(1) * N + tl.arange(0, N)
    inside = column < n
    line = expert * n + column
    acc = tl.zeros([M, N], tl.float32)
    for start in range(0, k, K):
        depth = start + tl.arange(0, K)
        deep = depth < k
        rows = tl.load(
            x + (routed // top_k)[:, None] * k + depth[None, :],
            mask=taken[:, None] & deep[None, :],
            other=0.0,
        )
        there = inside[:, None] & deep[None, :]
        pair = tl.load(
            codes + line[:, None] * (k // 2) + (depth // 2)[None, :], mask=there, other=0
        )
        scale = tl.load(
            scales + line[:, None] * (k // 16) + (depth // 16)[None, :], mask=there, other=0
        )
        code = (pair >> ((depth % 2) * 4).to(tl.uint8)[None, :]) & 15
        acc += product(rows, tl.trans(e2m1(code) * e4m3(scale)), True)
    factor = tl.load(factors + expert * parts + column // part, mask=inside, other=0.0)
    result = cast(acc * factor[None, :], out)
    target = out + routed[:, None] * n + column[None, :]
    tl.store(target, result, mask=taken[:, None] & inside[None, :])
