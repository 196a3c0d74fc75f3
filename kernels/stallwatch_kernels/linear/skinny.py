"""Linear layers prepared once and called at every step: y = x Wᵀ + b.

In float32 one kernel takes every number of rows, and a row's result has the same bits in any batch. In
bfloat16 it takes the few rows of a decode step, where reading the weight is all the cost; beyond, the
matrix unit of torch/oneDNN wins and no bits are promised across batch sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from stallwatch_kernels.admission import Candidate, Choice, choose
from stallwatch_kernels.errors import BadDtype, BadLayout, BadShape
from stallwatch_kernels.jit import kernel
from stallwatch_kernels.linear.native import call_panel, panel_address
from stallwatch_kernels.linear.vectors import BF16, F32
from stallwatch_kernels.pool import SERIAL, RowPool
from stallwatch_kernels.tensors import apart, check_rows
from stallwatch_kernels.warmup import Shapes, Task, of

OP = "linear"
SKINNY_BF16_ROWS = 4
"""Most rows of a bfloat16 call that the skinny kernel takes (measured crossing with oneDNN)."""

_FORMATS = {torch.float32: F32, torch.bfloat16: BF16}
_LEAST = 64  # rows of a weight worth a thread


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """What decides the implementation of one call, and what a warm-up needs."""

    inputs: int
    outputs: int
    dtype: torch.dtype
    rows: int = 1
    device: str = "cpu"
    bias: bool = False


def candidates(spec: LinearSpec) -> list[Candidate]:
    """The skinny kernel first, torch after it."""
    refusal: str | None = None
    if spec.device != "cpu":
        refusal = "runs on the CPU"
    elif spec.dtype not in _FORMATS:
        refusal = "reads float32 and bfloat16"
    elif spec.dtype == torch.bfloat16 and spec.rows > SKINNY_BF16_ROWS:
        refusal = f"takes at most {SKINNY_BF16_ROWS} rows in bfloat16"
    return [("skinny", refusal), ("torch", None)]


class Linear:
    """One weight, bound. Holds no buffers, so threads may share it.

    weight [N, K] float32 or bfloat16, elements of a row adjacent; bias [N] of the same type. x [M, K] is
    float32 or of the weight's type; y [M, N] has the type of x; sums are float32 and rounded once.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, pool: RowPool = SERIAL
    ) -> None:
        if weight.ndim != 2 or 0 in weight.shape:
            raise BadShape(OP, "weight", f"is {tuple(weight.shape)}; expected [N, K], not empty")
        if weight.dtype not in _FORMATS:
            raise BadDtype(OP, "weight", f"is {weight.dtype}; expected float32 or bfloat16")
        if weight.stride(1) != 1:
            raise BadLayout(
                OP, "weight", f"has strides {weight.stride()}; expected adjacent columns"
            )
        if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != weight.dtype):
            raise BadShape(
                OP, "bias", f"is {bias.dtype}{tuple(bias.shape)}; expected as weight's rows"
            )
        self.weight = weight.detach()
        self.bias = None if bias is None else bias.detach()
        self.outputs, self.inputs = weight.shape
        self._types = {torch.float32, weight.dtype}
        self._device = weight.device
        self._pool = pool
        self.few, self.many = (self._choice(rows) for rows in (1, SKINNY_BF16_ROWS + 1))
        self._skinny = self.few.impl == "skinny"
        self._bf16_rows = SKINNY_BF16_ROWS
        if self._skinny:
            stride = weight.stride(0) * weight.element_size()
            format_ = _FORMATS[weight.dtype]
            sizes = (weight.data_ptr(), stride, self.inputs, self.outputs)
            self._bound = (panel_address(), format_, *sizes)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """y, in `out` if given: contiguous [M, N] of x's type."""
        if x.ndim != 2 or x.shape[1] != self.inputs:
            raise BadShape(OP, "x", f"is {tuple(x.shape)}; expected [M, {self.inputs}]")
        if x.dtype not in self._types:
            raise BadDtype(OP, "x", f"is {x.dtype}; expected float32 or {self.weight.dtype}")
        if x.device != self._device:
            raise BadLayout(OP, "x", f"is on {x.device}; expected {self._device}")
        if out is None:
            out = x.new_empty((x.shape[0], self.outputs))
        else:
            self._check_out(x, out)
        x = x.detach()
        if not self._skinny or (x.dtype == torch.bfloat16 and x.shape[0] > self._bf16_rows):
            return self._torch(x, out)
        if x.dtype == torch.float32:
            self._run(x if x.is_contiguous() else x.contiguous(), out)
            return out
        wide = torch.empty(out.shape, dtype=torch.float32)
        self._run(x.float().contiguous(), wide)
        return out.copy_(wide)

    def bind(self, x: torch.Tensor, out: torch.Tensor) -> Callable[[int], None]:
        """Bind to static contiguous x [M, K], out [M, N]: a call computes the first rows, unchecked but for M."""
        self(x[:0], out[:0])
        apart(OP, ("out", "x"), out, x)
        most = min(x.shape[0], out.shape[0])
        if x.dtype != torch.float32 or not self._skinny or self.bias is not None:
            return partial(self._first, x, out, most)
        if not (x.is_contiguous() and out.is_contiguous()):
            raise BadLayout(OP, "x, out", "are not contiguous")
        bound, outputs, pool = self._bound, self.outputs, self._pool
        at_x, at_y = x.data_ptr(), out.data_ptr()
        alive = (self.weight, x, out)  # compiled code holds addresses and no references

        def run(rows: int, _alive: object = alive) -> None:
            check_rows(OP, rows, most)
            if pool.threads == 1:
                _columns(bound, at_x, rows, at_y, 0, outputs)
            else:
                pool.run(
                    lambda lo, hi: _columns(bound, at_x, rows, at_y, lo, hi), outputs, least=_LEAST
                )

        return run

    def _first(self, x: torch.Tensor, out: torch.Tensor, most: int, rows: int) -> None:
        check_rows(OP, rows, most)
        self(x[:rows], out[:rows])

    def _run(self, x: torch.Tensor, y: torch.Tensor) -> None:
        at_x, at_y, rows = x.data_ptr(), y.data_ptr(), x.shape[0]
        if self._pool.threads == 1:
            _columns(self._bound, at_x, rows, at_y, 0, self.outputs)
        else:
            self._pool.run(
                lambda lo, hi: _columns(self._bound, at_x, rows, at_y, lo, hi),
                self.outputs,
                least=_LEAST,
            )
        if self.bias is not None:
            y += self.bias

    def _check_out(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if out.shape != (x.shape[0], self.outputs) or out.dtype != x.dtype:
            expected = f"{x.dtype}[{x.shape[0]}, {self.outputs}]"
            raise BadShape(OP, "out", f"is {out.dtype}{tuple(out.shape)}; expected {expected}")
        if not out.is_contiguous() or out.device != x.device:
            raise BadLayout(OP, "out", "is not contiguous beside x")
        apart(OP, ("out", "x"), out, x)

    def _torch(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        out.copy_(torch.nn.functional.linear(x, self.weight.to(x.dtype), bias))
        return out

    def _choice(self, rows: int) -> Choice:
        device = self._device.type
        spec = LinearSpec(self.inputs, self.outputs, self.weight.dtype, rows, device)
        return choose(OP, candidates(spec))


@kernel
def _columns(  # noqa: PLR0917
    bound: tuple[int, ...], x: int, rows: int, y: int, lo: int, hi: int
) -> None:
    at_panel, fmt, w, stride, k, outputs = bound
    call_panel(
        at_panel,
        fmt,
        x,
        4 * k,
        rows,
        w + lo * stride,
        stride,
        0,
        0,
        0,
        k,
        hi - lo,
        y + 4 * lo,
        4 * outputs,
    )


@of(LinearSpec)
def tasks(spec: LinearSpec, _shapes: Shapes) -> list[Task]:
    """One call on a weight of no size: the compiled code is the same for every shape and both types."""
    if spec.device != "cpu" or spec.dtype not in _FORMATS:
        return []

    def run() -> None:
        Linear(torch.zeros((5, 32), dtype=spec.dtype))(torch.zeros((1, 32), dtype=spec.dtype))

    return [Task(f"{OP} {str(spec.dtype).removeprefix('torch.')}", run)]
