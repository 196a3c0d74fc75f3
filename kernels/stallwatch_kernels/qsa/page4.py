"""Paged sparse attention: the one call of the engine, and who answers it.

Two decisions. By type (`candidates`): which implementations take this call at all. By workload
(`settle`): whether the rows share enough for grouping to pay, from the reuse ratio that planning measured
against the ratio at which both took the same time when this machine was calibrated.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields, replace
from typing import Literal, cast

import numpy as np
import torch

from stallwatch_kernels import admission, gpu
from stallwatch_kernels.errors import BadLayout, BadShape
from stallwatch_kernels.pool import SERIAL, RowPool
from stallwatch_kernels.qsa import reference
from stallwatch_kernels.qsa.grouped import attend_groups
from stallwatch_kernels.qsa.lanes import E4M3_UNIT
from stallwatch_kernels.qsa.layout import (
    PagedKV,
    Rows,
    Selection,
    Store,
    check,
    selection,
    store,
)
from stallwatch_kernels.qsa.plan import GROUP, Plan, plan
from stallwatch_kernels.qsa.ungrouped import attend as attend_rows
from stallwatch_kernels.tensors import Array, apart

OP = "page4"
Impl = Literal["grouped", "ungrouped", "triton", "reference"]
CHUNK = 32  # blocks of a row at a time; measured against 1, 2 and 8 by the page4 bench
GROUP_CHUNK = 64  # blocks of a union: its widened keys and values still fit the second-level cache

_BITS: dict[torch.dtype, type[np.generic]] = {
    torch.float32: np.float32,
    torch.float16: np.int16,
    torch.bfloat16: np.uint16,
    torch.float8_e4m3fn: np.uint8,
}


@dataclass(frozen=True)
class Spec:
    """What static eligibility depends on."""

    q_heads: int
    kv_heads: int
    size: int
    page: int
    q_dtype: torch.dtype
    cache_dtype: torch.dtype
    device: str = "cpu"


@dataclass(frozen=True)
class Settled:
    """Which implementation ran, and why, in words; `reuse` is None when nothing was planned."""

    impl: Impl
    reason: str
    reuse: float | None = None


def spec_of(q: torch.Tensor, kv: PagedKV) -> Spec:
    """The descriptor of a call."""
    return Spec(
        q_heads=int(q.shape[1]),
        kv_heads=int(kv.k.shape[2]),
        size=int(q.shape[2]),
        page=int(kv.k.shape[1]),
        q_dtype=q.dtype,
        cache_dtype=kv.k.dtype,
        device=q.device.type,
    )


def candidates(spec: Spec) -> list[admission.Candidate]:
    """Implementations in order of preference, each with None or the reason why it cannot take the call."""
    compiled = None
    if spec.device != "cpu":
        compiled = f"compiled for the CPU, tensors on {spec.device}"
    elif spec.size % 16:
        compiled = f"head size {spec.size} is no multiple of 16"
    device = gpu.refusal()
    if spec.device == "cpu" and not gpu.interpreted():
        device = "the tensors are on the CPU"
    return [
        ("grouped", compiled),
        ("ungrouped", compiled),
        ("triton", device),
        ("reference", None),
    ]


def settle(rows: int, made: Plan | None, threshold: float) -> Settled:
    """The second decision, between grouped and ungrouped. `threshold` is the reuse ratio from which
    grouping pays (`calibrate`); `made` may be None where the answer does not need a plan.
    """
    if rows < GROUP:
        return Settled("ungrouped", f"{rows} rows make no group of {GROUP}")
    if made is None:
        return Settled("ungrouped", "grouping never paid when this machine was calibrated")
    side: Impl = "grouped" if made.reuse >= threshold else "ungrouped"
    sign = ">=" if side == "grouped" else "<"
    reason = f"reuse {made.reuse:.2f} {sign} {threshold:.2f}, where grouping begins to pay"
    return Settled(side, reason, made.reuse)


@dataclass(frozen=True)
class Call:
    """One checked call as compiled code wants it. Keeps the tensors alive whose addresses it holds."""

    kv: PagedKV
    spec: Spec
    cache: Array
    store: Store
    selection: Selection
    q: Array
    out: torch.Tensor
    scales: tuple[float, float]

    def ungrouped(self, lo: int, hi: int, chunk: int = CHUNK) -> None:
        """Rows lo..hi, each alone."""
        _inside("rows", lo, hi, len(self.q))
        attend_rows(
            self.cache,
            self.store,
            self.selection,
            self.q,
            self.out.numpy(),
            self.scales,
            (lo, hi, chunk),
        )

    def grouped(self, made: Plan, lo: int, hi: int, chunk: int = GROUP_CHUNK) -> None:
        """Groups lo..hi of the plan, which was made for this call's rows."""
        _inside("groups", lo, hi, min(made.groups, len(self.q) // GROUP))
        arrays = (made.starts, made.lengths, made.keys, made.masks)
        attend_groups(
            self.cache,
            self.store,
            self.selection,
            self.q,
            self.out.numpy(),
            self.scales,
            arrays,
            (lo, hi, chunk),
        )


def _inside(name: str, lo: int, hi: int, most: int) -> None:
    if not 0 <= lo <= hi <= most:
        raise BadShape(OP, name, f"{lo}..{hi} are not among the {most} of this call")


def prepare(q: torch.Tensor, kv: PagedKV, rows: Rows, *, out: torch.Tensor | None = None) -> Call:
    """Check the call, then look at the memory. Raises `KernelRefused` with the argument at fault.

    `out` float32 `[rows, Hq, D]`, contiguous; without it the call has one of its own.
    """
    check(q, kv, rows)
    if out is None:
        out = torch.empty(q.shape, dtype=torch.float32)
    else:
        _check_out(out, torch.float32, q, kv)
    unit = E4M3_UNIT if kv.k.dtype == torch.float8_e4m3fn else 1.0
    to_exponent = q.shape[2] ** -0.5 * kv.k_scale * unit * math.log2(math.e)
    return Call(
        kv=kv,
        spec=spec_of(q, kv),
        cache=np.empty(0, _BITS[kv.k.dtype]),
        store=store(kv),
        selection=selection(rows),
        q=q.detach().float().contiguous().numpy(),
        out=out.detach(),
        scales=(to_exponent, kv.v_scale * unit),
    )


def attend(
    q: torch.Tensor,
    kv: PagedKV,
    rows: Rows,
    *,
    threshold: float = 1.5,
    impl: Impl | None = None,
    pool: RowPool = SERIAL,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Settled]:
    """softmax(q k / sqrt(D)) v over each row's selected tokens: `[rows, Hq, D]` in q's type, in `out` if given.

    A row that reads nothing gives zeros. `threshold` as in `settle`; `impl` overrides both decisions (the
    caller has checked `candidates`), STALLWATCH_KERNEL_PAGE4 does for a whole process. Source: the sparse
    attention of Qwen4-Exp, softmax in float32.
    """
    if out is not None:
        _check_out(out, q.dtype, q, kv)
    result, settled = _attend(q, kv, rows, impl=impl, threshold=threshold, pool=pool, out=out)
    if out is None or result is out:
        return result, settled
    out.detach().copy_(result)
    return out, settled


def _check_out(out: torch.Tensor, dtype: torch.dtype, q: torch.Tensor, kv: PagedKV) -> None:
    if out.shape != q.shape or out.dtype != dtype:
        raise BadShape(OP, "out", f"is {out.dtype}{tuple(out.shape)}; {dtype}{tuple(q.shape)}")
    if not out.is_contiguous() or out.device != q.device:
        raise BadLayout(OP, "out", "is not contiguous beside q")
    for name, read in (("q", q), ("k", kv.k), ("v", kv.v)):
        apart(OP, ("out", name), out, read)


def _attend(
    q: torch.Tensor,
    kv: PagedKV,
    rows: Rows,
    *,
    impl: Impl | None,
    threshold: float,
    pool: RowPool,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, Settled]:
    """The result, in `out` where it can be written there at once."""
    if q.device.type != "cpu":
        return _on_device(q, kv, rows, threshold=threshold, impl=impl)
    direct = out if out is not None and out.dtype == torch.float32 else None
    call = prepare(q, kv, rows, out=direct)
    settled, made = _settled(call, impl, threshold, pool)
    if settled.impl == "reference":
        return reference.attend(q, kv, rows).to(q.dtype), settled
    if settled.impl == "triton":
        return _on_device(q, kv, rows, threshold=threshold, impl="triton")
    begin = 0
    if settled.impl == "grouped" and made is not None:
        pool.run(lambda lo, hi: call.grouped(made, lo, hi), made.groups)
        begin = made.groups * GROUP
    pool.run(lambda lo, hi: call.ungrouped(begin + lo, begin + hi), len(rows) - begin)
    return (call.out if direct is None else direct).to(q.dtype), settled


def _on_device(
    q: torch.Tensor, kv: PagedKV, rows: Rows, *, threshold: float, impl: Impl | None
) -> tuple[torch.Tensor, Settled]:
    """Triton's kernels (interpreted: on CPU tensors), planned from copies of the index tensors on the host."""
    reason = "asked for"
    if impl is None:
        choice = admission.choose(OP, candidates(spec_of(q, kv)))
        impl, reason = cast("Impl", choice.impl), choice.reason
    host = Rows(*(getattr(rows, field.name).cpu() for field in fields(Rows)))
    if impl == "reference":
        there = replace(kv, k=kv.k.cpu(), v=kv.v.cpu())
        return reference.attend(q.cpu(), there, host).to(q), Settled(impl, reason)
    if impl != "triton":
        raise BadLayout(OP, "q", f"is on {q.device}, where {impl} does not run")
    from stallwatch_kernels.gpu.page4 import attend as attend_there  # noqa: PLC0415 - imports triton

    worth = len(rows) >= GROUP and threshold < math.inf
    made = plan(store(kv), selection(host)) if worth else None
    side = settle(len(rows), made, threshold)
    result = attend_there(q, kv, rows, made=made if side.impl == "grouped" else None)
    return result, Settled("triton", f"{reason}; {side.impl}: {side.reason}", side.reuse)


def _settled(
    call: Call, impl: Impl | None, threshold: float, pool: RowPool
) -> tuple[Settled, Plan | None]:
    """Type first, then workload; whoever asked for an implementation gets it."""
    if impl is None:
        choice = admission.choose(OP, candidates(call.spec))
        asked = admission.override_name(OP) in os.environ
        if choice.impl in {"triton", "reference"} or asked:
            impl, reason = cast("Impl", choice.impl), choice.reason
    else:
        reason = "asked for"
    if impl is not None:
        made = plan(call.store, call.selection, pool) if impl == "grouped" else None
        return Settled(impl, reason, made.reuse if made else None), made
    count = call.q.shape[0]
    worth = count >= GROUP and threshold < math.inf
    made = plan(call.store, call.selection, pool) if worth else None
    return settle(count, made, threshold), made
