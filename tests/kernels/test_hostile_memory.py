"""Buffers that overlap, are too short, need a gradient, or are called for more rows than they hold."""

from __future__ import annotations

import pytest
import torch

from stallwatch_kernels.errors import BadDtype, BadIndex, BadLayout, BadMetadata, BadShape
from stallwatch_kernels.gdn.batch import Carried
from stallwatch_kernels.gdn.conv import CausalConv
from stallwatch_kernels.gdn.recurrence import GatedDeltaRule, Inputs
from stallwatch_kernels.gdn.reference import Heads as DeltaHeads
from stallwatch_kernels.hc.mixer import Mixer
from stallwatch_kernels.hc.reference import Weights
from stallwatch_kernels.linear.skinny import Linear
from stallwatch_kernels.moe.experts import RoutedExperts
from stallwatch_kernels.moe.route import bind_route, route
from stallwatch_kernels.moe.shared import SharedExpert
from stallwatch_kernels.moe.weights import ExpertWeights
from stallwatch_kernels.norm.rms import GatedRmsNorm, RmsNorm
from stallwatch_kernels.ple.conv import Conv
from stallwatch_kernels.ple.gate import Gate, GateWeights
from stallwatch_kernels.ple.gather import Gather
from stallwatch_kernels.ple.table import Format, Shard, Table
from stallwatch_kernels.qsa import indexer, page4, synthetic
from stallwatch_kernels.qsa.indexer import KeyCache, Norm, Where
from stallwatch_kernels.qsa.project import (
    Heads,
    Places,
    Project,
    Projected,
    bind_gate,
    bind_scatter,
)
from stallwatch_kernels.qsa.rotary import Rotary
from stallwatch_kernels.qsa.select import bind_select
from stallwatch_kernels.qsa.synthetic import Mix
from stallwatch_kernels.tensors import apart, same_or_apart

pytestmark = pytest.mark.slow  # a first run compiles every kernel

M, H = 4, 32  # rows and width of the small calls here


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def shifted(width: int = H, by: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Two buffers of M rows, the second one `by` rows further on in the same memory."""
    memory = randn(M + by, width)
    return memory[:M], memory[by:]


DELTA = DeltaHeads(1, 1, 8, 8)
QSA = Heads(2, 1, 16, 1, 16)


def norm_over() -> object:
    return RmsNorm(torch.zeros(H), 1e-6).bind(*shifted())


def gated_norm_over() -> object:
    gate, out = shifted()
    return GatedRmsNorm(torch.ones(H), 1e-6).bind(randn(M, H), gate, out)


def linear_over() -> object:
    x = randn(M, H)
    return Linear(randn(H, H))(x, x)


def bound_linear_over() -> object:
    return Linear(randn(H, H)).bind(*shifted())


def causal_conv_over() -> object:
    x = randn(M, H)
    carried = Carried(torch.zeros(1, 3, H), ints(0), ints(0, M))
    return CausalConv(torch.zeros(H, 4)).bind(x, x, carried)


def delta_over() -> object:
    state = torch.zeros(1, 1, 8, 8)
    qkv = randn(M, DELTA.width)
    inputs = Inputs(qkv, torch.zeros(M, 1), torch.zeros(M, 1))
    return GatedDeltaRule(DELTA, torch.zeros(1), torch.zeros(1)).bind(
        inputs, qkv[:, 4:12], Carried(state, ints(0), ints(0, M))
    )


def mixer() -> Mixer:
    width = 2 * H
    return Mixer(Weights(randn(4, width), randn(width, 4), torch.zeros(width), None, 2, 1e-6))


def mixer_read_over() -> object:
    h = randn(M, 2 * H)
    return mixer().bind_read(h, h[:, :H])


def mixer_write_over() -> object:
    h = randn(M, 2 * H)
    return mixer().bind_write(h, h[:, H:], torch.zeros(M, 2))


def ple_conv_over() -> object:
    c, out = shifted()
    carried = Carried(torch.zeros(1, 9, H), ints(0), ints(0, M))
    return Conv(torch.zeros(H, 4), 3).bind(randn(M, H), c, carried, out)


def ple_gate_over() -> object:
    weights = GateWeights(*(torch.zeros(2 * H),) * 3, 2)
    wide = randn(M, 2 * H)
    return Gate(weights).bind(wide, wide[:, :H], randn(M, 2 * H), u=wide, c=torch.zeros(M, 2 * H))


def experts() -> RoutedExperts:
    return RoutedExperts(ExpertWeights.dense(randn(2, 32, 16), randn(2, 16, 16)), 2)


def experts_over() -> object:
    x = randn(M, 16)
    shares, ids = route(randn(M, 2), 2)
    return experts()(x, ids, shares, x)


def shared_over() -> object:
    x = randn(M, 16)
    parts = Linear(randn(32, 16)), Linear(randn(16, 16)), Linear(randn(1, 16))
    return SharedExpert(*parts).bind(x, x)


def route_over() -> object:
    logits = randn(M, 4)
    return bind_route(logits, logits[:, :2].contiguous(), ids_in(logits), renormalise=True)


def ids_in(logits: torch.Tensor) -> torch.Tensor:
    """int32 [M, 2] at the beginning of the logits' memory."""
    return logits.view(torch.int32).view(-1)[: 2 * M].view(M, 2)


def attention_over() -> object:
    mix = Mix(M, context=64, budget=16)
    kv, rows = synthetic.caches((1, 16, 8), mix), synthetic.rows(8, mix)
    q = synthetic.queries(2, 16, mix)
    return page4.attend(q, kv, rows, out=q)


def projected_over() -> object:
    merged = randn(M, QSA.width)
    out = Projected.empty(QSA, M, torch.float32)
    out = Projected(merged.view(-1)[: M * 32].view(M, 2, 16), out.k, out.v, out.index_q, out.raw)
    return project().bind(merged, ints(*range(M)), out)


def project() -> Project:
    return Project(QSA, (torch.zeros(16),) * 3, Rotary(2, 1e4, 8), 1e-6)


def output_gate_over() -> object:
    merged = randn(M, QSA.width)
    values = randn(M, 2, 16)
    return bind_gate(values, merged, values.view(M, 32), QSA)


def scatter_over() -> object:
    cache = randn(2, 4, H)
    places = Places(ints(0, 1).view(1, 2), ints(0, 0, 0, 0), ints(0, 1, 2, 3))
    return bind_scatter(cache[0], cache, places)


OVERLAPPING = [
    norm_over,
    gated_norm_over,
    linear_over,
    bound_linear_over,
    causal_conv_over,
    delta_over,
    mixer_read_over,
    mixer_write_over,
    ple_conv_over,
    ple_gate_over,
    experts_over,
    shared_over,
    route_over,
    attention_over,
    projected_over,
    output_gate_over,
    scatter_over,
]


@pytest.mark.parametrize("call", OVERLAPPING, ids=lambda call: call.__name__)
def test_an_output_over_an_input_is_refused(call) -> None:
    """A kernel that would read what it has just written refuses by name, before it writes."""
    with pytest.raises(BadLayout, match="shares memory with"):
        call()


def test_columns_of_one_matrix_lie_beside_each_other() -> None:
    """Slices of a merged projection overlap in range and in no element: they are let through, a shared column is not."""
    merged = torch.zeros(5, 12)
    apart("k", ("a", "b"), merged[:, :4], merged[:, 4:])
    apart("k", ("a", "b"), merged[:, 8:], merged[:, :8])
    same_or_apart("k", ("a", "b"), merged[:, :4], merged[:, :4])
    for first, second in ((slice(0, 5), slice(4, 8)), (slice(4, 8), slice(0, 5))):
        with pytest.raises(BadLayout):
            apart("k", ("a", "b"), merged[:, first], merged[:, second])
    with pytest.raises(BadLayout):
        same_or_apart("k", ("a", "b"), merged[1:, :4], merged[:-1, :4])


def bound_calls() -> dict[str, object]:
    """One bound call of each kernel whose buffers hold M rows."""
    x, wide = randn(M, 16), randn(M, QSA.width)
    shares, ids = route(randn(M, 2), 2)
    parts = Linear(randn(32, 16)), Linear(randn(16, 16)), Linear(randn(1, 16))
    places = Places(ints(0, 1).view(1, 2), ints(0, 0, 0, 0), ints(0, 1, 2, 3))
    keys = KeyCache(randn(1, 8, 16), ints(0).view(1, 1))
    where = Where(ints(0, 0, 0, 0), ints(8, 9, 10, 11), ints(12))
    indices, counts = torch.zeros(M, 7).int(), torch.zeros(M).int()
    hidden, bf16 = randn(M, 2 * H), randn(M, 16).bfloat16()
    return {
        "norm": RmsNorm(torch.zeros(16), 1e-6).bind(x, x),
        "linear": parts[1].bind(x, randn(M, 16)),
        "linear bf16": Linear(randn(8, 16).bfloat16()).bind(bf16, randn(M, 8).bfloat16()),
        "experts": experts().bind(x, ids, shares, randn(M, 16)),
        "shared": SharedExpert(*parts).bind(randn(M, 16), x),
        "route": bind_route(randn(M, 2), shares, ids, renormalise=True),
        "hc read": mixer().bind_read(hidden, randn(M, H)),
        "hc write": mixer().bind_write(hidden, randn(M, H), randn(M, 2)),
        "project": project().bind(wide, ints(*range(M)), Projected.empty(QSA, M, torch.float32)),
        "output gate": bind_gate(randn(M, 2, 16), wide, randn(M, 32), QSA),
        "scatter": bind_scatter(randn(M, H), randn(2, 4, H), places),
        "extend": indexer.bind_extend(
            randn(M, 16), torch.zeros(1, 4, 16), keys, where, norm=zero_norm()
        ),
        "select": bind_select(randn(M, 1, 16), keys, where, indices, counts),
    }


def zero_norm() -> Norm:
    return Norm(torch.zeros(16), Rotary(2, 1e4, 8))


BOUND = list(bound_calls())


@pytest.mark.parametrize("name", BOUND)
def test_a_bound_call_takes_no_more_rows_than_its_buffers_hold(name: str) -> None:
    """All of its rows and none run; one more, or fewer than none, is refused."""
    call = bound_calls()[name]
    call(M)
    call(0)
    for rows in (M + 1, -1, 2**40):
        with pytest.raises(BadShape, match="hold"):
            call(rows)


def test_rows_and_groups_outside_of_a_prepared_attention_are_refused() -> None:
    """A prepared call computes the rows that it was prepared for."""
    mix = Mix(M, context=64, budget=16)
    kv, rows = synthetic.caches((1, 16, 8), mix), synthetic.rows(8, mix)
    call = page4.prepare(synthetic.queries(2, 16, mix), kv, rows)
    for lo, hi in ((0, M + 1), (-1, M), (3, 2)):
        with pytest.raises(BadShape):
            call.ungrouped(lo, hi)


@pytest.mark.parametrize("tokens", [3, 50])
def test_a_bound_call_refuses_an_expert_that_does_not_exist(tokens: int) -> None:
    """Ids in a static buffer are looked at in every call, on both sides of the gate; `out` stays."""
    x, out = randn(tokens, 16), torch.full((tokens, 16), 7.0)
    shares, ids = route(randn(tokens, 2), 2)
    call = experts().bind(x, ids, shares, out)
    for bad in (-1, 2, 2**31 - 1):
        ids[1, 1] = bad
        with pytest.raises(BadIndex, match=str(bad)):
            call(tokens)

    assert bool(out.eq(7.0).all())


@pytest.mark.parametrize("width", [0, 2, 3, 6, 8, 9])
def test_a_selection_that_no_budget_has_is_refused(width: int) -> None:
    """`indices` has room for whole blocks and a tail of three, or the tail would be written behind it."""
    keys = KeyCache(randn(1, 8, 16), ints(0).view(1, 1))
    where = Where(ints(0), ints(11), ints(12))
    with pytest.raises(BadMetadata, match="columns"):
        bind_select(randn(1, 1, 16), keys, where, torch.zeros(1, width).int(), ints(0))


def test_an_indexer_refuses_what_does_not_fit_its_raw_keys() -> None:
    """Too few positions, another head size and pages without room are named, and the ring is as it was."""
    raw, ring = randn(M, 16), torch.zeros(1, 4, 16)
    norm = zero_norm()
    table, full = ints(0).view(1, 1), Where(ints(0, 0, 0, 0), ints(0, 1, 2, 3), ints(4))
    bad = [
        (KeyCache(randn(1, 2, 16), table), Where(ints(0), ints(0), ints(4)), "row_req"),
        (KeyCache(randn(1, 2, 32), table), full, "keys"),
        (KeyCache(randn(1, 0, 16), table), full, "keys"),
    ]
    for cache, where, argument in bad:
        with pytest.raises(BadShape) as caught:
            indexer.extend(raw, ring, cache, where, norm=norm)
        assert caught.value.argument == argument
    with pytest.raises(BadShape):
        indexer.score(randn(1, 1, 16), KeyCache(randn(1, 0, 16), table), where)

    assert bool(ring.eq(0).all())


def test_projection_buffers_of_other_heads_are_refused() -> None:
    """Each of the five buffers of a projection, and those of gate and scatter, must have its shape."""
    merged, good = randn(M, QSA.width), Projected.empty(QSA, M, torch.float32)
    parts = {name: getattr(good, name) for name in ("q", "k", "v", "index_q", "raw")}
    for name, buffer in parts.items():
        with pytest.raises(BadShape) as caught:
            project().bind(merged, ints(*range(M)), Projected(**parts | {name: buffer[:-1]}))
        assert caught.value.argument == name
    with pytest.raises(BadShape):
        bind_gate(good.q[:-1], merged, randn(M, 32), QSA)
    with pytest.raises(BadShape):
        bind_gate(good.q, merged, randn(M, 16), QSA)
    short = Places(ints(0).view(1, 1), ints(0), ints(0))
    with pytest.raises(BadShape):
        bind_scatter(randn(M, H), randn(1, 4, H), short)
    with pytest.raises(BadDtype):
        bind_scatter(randn(M, H).double(), randn(1, 4, H).double(), short)
    with pytest.raises(BadShape):
        Gather(Table(Format.FP32, 16, [Shard(randn(4, 16))]), torch.float32)(torch.zeros(3).long())


def test_parameters_that_need_a_gradient_are_read_like_any_other() -> None:
    """Weights, inputs and states with requires_grad give the bits of plain ones, and no graph."""

    def leaf(*shape: int) -> torch.Tensor:
        return randn(*shape).requires_grad_()

    def results(make) -> list[torch.Tensor]:
        x, wide = make(M, 16), make(M, 2 * 16)
        ids = route(randn(M, 2), 2)[1]
        weights = Weights(make(4, 32), make(32, 4), make(32), make(2, 32), 2, 1e-6)
        mix = Mix(M, context=64, budget=16)
        kv, rows = synthetic.caches((1, 16, 8), mix), synthetic.rows(8, mix)
        kv = page4.PagedKV(*(make(*kv.k.shape) for _ in "kv"))
        carried = Carried(torch.zeros(1, 3, 16), ints(0), ints(0, M))
        return [
            RmsNorm(make(16), 1e-6)(x),
            GatedRmsNorm(make(16), 1e-6)(x, make(M, 16)),
            Linear(make(8, 16))(x),
            Linear(make(8, 16).bfloat16())(x.bfloat16()),
            route(make(M, 2), 2)[0],
            RoutedExperts(ExpertWeights.dense(make(2, 32, 16), make(2, 16, 16)), 2)(
                x, ids, make(M, 2)
            ),
            *Mixer(weights).read(wide),
            CausalConv(make(16, 4))(x, carried),
            *Gate(GateWeights(make(32), make(32), make(32), 2))(wide, x, wide, tokens=M),
            page4.attend(make(M, 2, 16), kv, rows, impl="ungrouped")[0],
            indexer.score(
                make(M, 1, 16), KeyCache(make(1, 8, 16), ints(0).view(1, 1)), where_all()
            ),
        ]

    for ours, plain in zip(results(leaf), results(randn), strict=True):
        assert not ours.requires_grad
        assert torch.equal(ours, plain)


def where_all() -> Where:
    return Where(ints(0, 0, 0, 0), ints(8, 9, 10, 11), ints(12))
