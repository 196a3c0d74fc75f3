"""Experts' matrices in float32, bfloat16 or NVFP4 behind one interface, checked once when bound."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stallwatch_kernels.errors import BadDtype, BadLayout, BadMetadata, BadShape
from stallwatch_kernels.linear.native import panel_address
from stallwatch_kernels.linear.vectors import BF16, F32, NVFP4
from stallwatch_kernels.nvfp4 import codec
from stallwatch_kernels.tensors import e4m3_table

_OP = "moe-experts"
_FORMATS = {torch.float32: F32, torch.bfloat16: BF16}
_E4M3 = e4m3_table()


@dataclass(frozen=True, slots=True)
class Stack:
    """One matrix [rows, k] per expert. Make it with `dense` or `nvfp4`.

    factors float32 [E, parts]: what a product of part p (rows p * rows/parts onward) is multiplied by
    last: 1, or half of the NVFP4 global, because products come out for twice the code.
    """

    format: int
    data: torch.Tensor
    scales: torch.Tensor | None
    factors: torch.Tensor
    experts: int
    rows: int
    k: int

    @classmethod
    def dense(cls, data: torch.Tensor, parts: int = 1) -> Stack:
        """From data [E, rows, k], float32 or bfloat16."""
        if data.dtype not in _FORMATS:
            raise BadDtype(_OP, "weights", f"are {data.dtype}; expected float32 or bfloat16")
        _check_matrix(data)
        experts, rows, k = data.shape
        return cls(_FORMATS[data.dtype], data, None, torch.ones(experts, parts), experts, rows, k)

    @classmethod
    def nvfp4(cls, packed: codec.Packed, parts: int = 1) -> Stack:
        """From codes uint8 [E, rows, k/2], scales [E, rows, k/16], global [E] or [E, parts]. Refuses a NaN scale."""
        codec.check(packed)
        _check_matrix(packed.codes)
        if not packed.scales.is_contiguous():
            raise BadLayout(_OP, "scales", "are not contiguous")
        experts, rows, half = packed.codes.shape
        factors = packed.global_scale.to(torch.float32).reshape(-1)
        if factors.numel() not in {experts, experts * parts}:
            shape = tuple(packed.global_scale.shape)
            raise BadShape(_OP, "global_scale", f"is {shape}; expected [{experts}, {parts}]")
        factors = (factors.reshape(experts, -1) * 0.5).expand(experts, parts).contiguous()
        return cls(NVFP4, packed.codes, packed.scales, factors, experts, rows, half * 2)

    @property
    def row_bytes(self) -> int:
        """From one row to the next."""
        return int(self.data.stride(1) * self.data.element_size())

    def operands(self) -> tuple[int, ...]:
        """What the passes read: the panel, format, data, its expert and row strides, scales, their strides, E4M3 table, k."""
        at_scales = 0 if self.scales is None else self.scales.data_ptr()
        row_scales = 0 if self.scales is None else self.k // codec.GROUP
        at_table: int = _E4M3.ctypes.data
        return (
            panel_address(),
            self.format,
            self.data.data_ptr(),
            self.row_bytes * self.rows,
            self.row_bytes,
            at_scales,
            row_scales * self.rows,
            row_scales,
            at_table,
            self.k,
        )


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """w13: gate rows over up rows, [E, 2 I, H] in two parts; w2 [E, H, I]."""

    w13: Stack
    w2: Stack

    def __post_init__(self) -> None:
        expected = (self.w13.experts, self.w13.k, self.w13.rows // 2)
        got = (self.w2.experts, self.w2.rows, self.w2.k)
        if got != expected or self.w13.rows % 2:
            raise BadMetadata(
                _OP, "w2", f"is [E, H, I] = {got} and w13 [E, 2 I, H] asks for {expected}"
            )
        if self.w13.factors.shape[1] != 2 or self.w2.factors.shape[1] != 1:
            raise BadMetadata(_OP, "w13", "has two parts, gate and up, and w2 one")

    @classmethod
    def dense(cls, w13: torch.Tensor, w2: torch.Tensor) -> ExpertWeights:
        """float32 or bfloat16 [E, 2 I, H] and [E, H, I]."""
        return cls(Stack.dense(w13, 2), Stack.dense(w2))

    @classmethod
    def nvfp4(cls, w13: codec.Packed, w2: codec.Packed) -> ExpertWeights:
        """The global scales are [E, 2] (gate, up) or [E], and [E]."""
        return cls(Stack.nvfp4(w13, 2), Stack.nvfp4(w2))

    @property
    def experts(self) -> int:
        return self.w13.experts

    @property
    def hidden(self) -> int:
        return self.w13.k

    @property
    def inner(self) -> int:
        return self.w2.k


def _check_matrix(data: torch.Tensor) -> None:
    if data.ndim != 3 or 0 in data.shape:
        raise BadShape(_OP, "weights", f"are {tuple(data.shape)}; expected [E, rows, k], not empty")
    if not data.is_contiguous() or data.device.type != "cpu":
        raise BadLayout(_OP, "weights", "are not contiguous on the CPU")
