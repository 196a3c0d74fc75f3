"""The shared expert, which every token visits, weighted by a sigmoid of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch

from stallwatch_kernels.errors import BadMetadata, BadShape
from stallwatch_kernels.linear.skinny import Linear
from stallwatch_kernels.moe import passes
from stallwatch_kernels.tensors import apart

_OP = "moe-shared"


class SharedExpert:
    """out += sigmoid(<gate, x>) · down (silu(g) ⊙ u), with [g | u] = gate_up x.

    gate_up [2 I, H], down [H, I], gate [1, H]: linear layers already bound.
    """

    def __init__(self, gate_up: Linear, down: Linear, gate: Linear) -> None:
        shapes = [(layer.outputs, layer.inputs) for layer in (gate_up, down, gate)]
        hidden, inner = shapes[1]
        if shapes[0] != (2 * inner, hidden) or shapes[2] != (1, hidden):
            raise BadMetadata(_OP, "shapes", f"gate_up, down, gate are {shapes}")
        self._gate_up, self._down, self._gate = gate_up, down, gate

    def add_to(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Add to `out`, float32 [M, H]. x [M, H] of float32 or the weights' type; nothing is rounded between."""
        if out.shape != x.shape or out.dtype != torch.float32 or not out.is_contiguous():
            raise BadShape(_OP, "out", f"is {out.dtype}{tuple(out.shape)}; expected float32 as x")
        apart(_OP, ("out", "x"), out, x)
        wide = x.detach().float()
        both = self._gate_up(wide)
        h = torch.empty((x.shape[0], self._down.inputs), dtype=torch.float32)
        passes.activate(both.numpy(), h.numpy())
        passes.add_gated(self._down(h).numpy(), self._gate(wide).numpy(), out.detach().numpy())
        return out

    def bind(self, out: torch.Tensor, x: torch.Tensor) -> Callable[[int], None]:
        """The same between static float32 buffers, intermediates included; a call takes the rows."""
        if out.shape != x.shape or not out.dtype == x.dtype == torch.float32:
            raise BadShape(_OP, "out", f"is {out.dtype}{tuple(out.shape)}; expected float32 as x")
        apart(_OP, ("out", "x"), out, x)
        x, out = x.detach(), out.detach()
        most, inner = x.shape[0], self._down.inputs
        both, h = torch.empty(most, 2 * inner), torch.empty(most, inner)
        y, gate = torch.empty_like(x), torch.empty(most, 1)
        gate_up, gated = self._gate_up.bind(x, both), self._gate.bind(x, gate)
        down = self._down.bind(h, y)
        arrays = tuple(t.numpy() for t in (both, h, y, gate, out))

        def run(rows: int) -> None:
            a, b, c, d, e = (each[:rows] for each in arrays)
            gate_up(rows)
            passes.activate(a, b)
            down(rows)
            gated(rows)
            passes.add_gated(c, d, e)

        return run
