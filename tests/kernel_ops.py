"""Every op of a decode step as one shape: rows of input, what the kernel makes of them, and what float64 does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from stallwatch_kernels.gdn import reference as gdn
from stallwatch_kernels.gdn.batch import Carried
from stallwatch_kernels.gdn.conv import CausalConv
from stallwatch_kernels.gdn.recurrence import GatedDeltaRule, Inputs
from stallwatch_kernels.gdn.reference import Heads
from stallwatch_kernels.hc import reference as hc
from stallwatch_kernels.hc.mixer import Mixer
from stallwatch_kernels.linear.skinny import Linear
from stallwatch_kernels.moe.experts import RoutedExperts
from stallwatch_kernels.moe.reference import routed_reference
from stallwatch_kernels.moe.route import route
from stallwatch_kernels.moe.weights import ExpertWeights
from stallwatch_kernels.norm import reference as norm
from stallwatch_kernels.norm.rms import GatedRmsNorm, RmsNorm
from stallwatch_kernels.ple import conv as ple_conv
from stallwatch_kernels.ple.conv import Conv
from stallwatch_kernels.ple.gate import Gate, GateWeights
from stallwatch_kernels.ple.gate import reference as gate_reference
from stallwatch_kernels.ple.gather import Gather
from stallwatch_kernels.ple.table import Format, Shard, Table, dequantise
from stallwatch_kernels.pool import SERIAL, RowPool

HEADS = Heads(1, 2, 8, 16)


@dataclass
class Op:
    """Rows of input, and what ours and float64 make of them; `ours` computes each row (a request of its own)."""

    inputs: tuple[torch.Tensor, ...]
    ours: Callable[..., torch.Tensor]
    exact: Callable[..., torch.Tensor]

    def of(self, count: int) -> torch.Tensor:
        return self.ours(*(x[:count] for x in self.inputs))


Draw = Callable[..., torch.Tensor]


def norms(rows: int, dtype: torch.dtype, draw: Draw, pool: RowPool = SERIAL) -> Op:
    weight = draw(48)
    return Op(
        (draw(rows, 48).to(dtype),),
        RmsNorm(weight, 1e-6, 16, pool),
        lambda x: norm.rms_norm(x, weight.double(), 1e-6, 16),
    )


def gated_norms(rows: int, dtype: torch.dtype, draw: Draw, pool: RowPool = SERIAL) -> Op:
    weight = draw(16)
    return Op(
        (draw(rows, 48).to(dtype), draw(rows, 48).to(dtype)),
        GatedRmsNorm(weight, 1e-6, pool),
        lambda x, z: norm.gated_rms_norm(x, z, weight.double(), 1e-6),
    )


def linear(rows: int, dtype: torch.dtype, draw: Draw, pool: RowPool = SERIAL) -> Op:
    weight = draw(37, 100).to(dtype)
    return Op(
        (draw(rows, 100).to(dtype),), Linear(weight, pool=pool), lambda x: x @ weight.double().t()
    )


def experts(rows: int, dtype: torch.dtype, draw: Draw, pool: RowPool = SERIAL) -> Op:
    w13, w2 = (draw(4, 64, 48) / 7).to(dtype), (draw(4, 48, 32) / 5).to(dtype)
    bound = RoutedExperts(ExpertWeights.dense(w13, w2), 2, pool=pool)
    shares, ids = route(draw(rows, 4), 2)
    return Op(
        (draw(rows, 48).to(dtype), ids, shares),
        bound,
        lambda x, i, s: routed_reference(x, i.int(), s, w13.double(), w2.double()),
    )


def mixer(rows: int, dtype: torch.dtype, draw: Draw, pool: RowPool = SERIAL) -> Op:
    parts = (draw(6, 64) / 4).to(dtype), draw(64, 6).to(dtype), draw(64) * 0.2, None
    wide = (parts[0].double(), parts[1].double(), parts[2].double(), None)
    return Op(
        (draw(rows, 64).to(dtype),),
        lambda h: Mixer(hc.Weights(*parts, 2, 1e-6), pool).read(h)[0],
        lambda h: hc.read(h, hc.Weights(*wide, 2, 1e-6))[0],
    )


def carried(state: torch.Tensor, rows: int) -> Carried:
    """Each row a request of its own, in slots that do not ascend."""
    return Carried(state, torch.arange(rows).flip(0).int(), torch.arange(rows + 1).int())


def causal_conv(rows: int, dtype: torch.dtype, draw: Draw, pool: RowPool = SERIAL) -> Op:
    weight, past = draw(24, 4), draw(rows, 3, 24).to(dtype)
    op = CausalConv(weight, pool)

    def ours(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return op(x, carried(state.flip(0).contiguous(), len(x)))

    def exact(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        pairs = zip(x, state, strict=True)
        return torch.cat([gdn.causal_conv(a[None], weight.double(), s)[0] for a, s in pairs])

    return Op((draw(rows, 24).to(dtype), past), ours, exact)


def delta(rows: int, dtype: torch.dtype, draw: Draw, pool: RowPool = SERIAL) -> Op:
    a_log, bias = draw(2), draw(2)
    op = GatedDeltaRule(HEADS, a_log, bias, pool)

    def ours(
        qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        return op(Inputs(qkv, a, b), carried(state.flip(0).contiguous(), len(qkv)))

    def exact(
        qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        decay, beta = gdn.gates(a, b, a_log.double(), bias.double())
        one = (slice(r, r + 1) for r in range(len(qkv)))
        return torch.cat(
            [gdn.delta_rule(qkv[r], decay[r], beta[r], state[r][0], HEADS)[0] for r in one]
        )

    inputs = draw(rows, HEADS.width).to(dtype), draw(rows, 2).to(dtype), draw(rows, 2).to(dtype)
    return Op((*inputs, draw(rows, 2, 8, 16)), ours, exact)


def away_from_zero(keys: torch.Tensor, noise: torch.Tensor, streams: int) -> torch.Tensor:
    """Residuals whose product with the keys is clearly positive or negative, as the noise falls.

    The gate takes the root of that product. At zero a root has no slope: there any float32 is as far off as it likes.
    """
    per_stream = noise.unflatten(-1, (streams, -1))
    side = torch.where(per_stream[..., :1] < 0, -2.0, 2.0)
    return (per_stream + side * keys.unflatten(-1, (streams, -1))).flatten(-2)


def ple_gate(rows: int, dtype: torch.dtype, draw: Draw, pool: RowPool = SERIAL) -> Op:
    parts = [draw(64) * 0.2 for _ in "kqc"]
    weights = GateWeights(*parts, 2)
    wide = GateWeights(*(p.double() for p in parts), 2)
    k, v = draw(rows, 64), draw(rows, 32)
    inputs = k, v, away_from_zero(k, draw(rows, 64), 2)
    return Op(
        tuple(x.to(dtype) for x in inputs),
        lambda k, v, h: torch.cat(Gate(weights, pool)(k, v, h, tokens=len(h)), 1),
        lambda k, v, h: torch.cat(gate_reference(wide, k, v, h), 1),
    )


def ple_convolution(rows: int, dtype: torch.dtype, draw: Draw, pool: RowPool = SERIAL) -> Op:
    weight = draw(24, 4) * 0.5
    op = Conv(weight, 3, pool)

    def ours(u: torch.Tensor, c: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return op(u, c, carried(state.flip(0).contiguous(), len(u)))

    def exact(u: torch.Tensor, c: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        batch = carried(state.flip(0).contiguous(), len(u))
        return ple_conv.reference(weight.double(), 3, u, c, carried=batch)

    inputs = draw(rows, 24), draw(rows, 24), draw(rows, 9, 24)
    return Op(tuple(x.to(dtype) for x in inputs), ours, exact)


def gather(rows: int, dtype: torch.dtype, draw: Draw, pool: RowPool = SERIAL) -> Op:
    table = Table(Format.FP8, 24, [Shard(draw(50, 24).to(torch.float8_e4m3fn), factor=0.3)])
    ids = (draw(rows, 2).abs() * 1e6).long() % 50
    return Op(
        (ids,),
        Gather(table, dtype, pool),
        lambda i: dequantise(table, i.long()).double().reshape(len(i), -1),
    )


OPS = [
    norms,
    gated_norms,
    linear,
    experts,
    mixer,
    causal_conv,
    delta,
    ple_gate,
    ple_convolution,
    gather,
]


def doubled(x: torch.Tensor) -> torch.Tensor:
    """Floats as float64, ids as they are."""
    return x.double() if x.is_floating_point() else x
