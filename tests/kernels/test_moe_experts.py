"""Routed experts: right against float64 in every format, the same bits on every path, refusals by name."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from oracle import tiny_model
from stallwatch_kernels import jit
from stallwatch_kernels.admission import choose
from stallwatch_kernels.errors import (
    BadDtype,
    BadIndex,
    BadLayout,
    BadMetadata,
    BadScale,
    BadShape,
    KernelRefused,
)
from stallwatch_kernels.linear.skinny import Linear
from stallwatch_kernels.moe.experts import ExpertsSpec, RoutedExperts, candidates, tasks
from stallwatch_kernels.moe.layout import Groups, expert_layout, slot_layout
from stallwatch_kernels.moe.reference import routed_reference
from stallwatch_kernels.moe.route import route
from stallwatch_kernels.moe.shared import SharedExpert
from stallwatch_kernels.moe.weights import ExpertWeights
from stallwatch_kernels.nvfp4 import codec
from stallwatch_kernels.pool import RowPool
from stallwatch_kernels.warmup import Shapes

E, H, INNER, TOP = 8, 80, 48, 4  # K of both products: one whole vector and more; N: strips only
FORMATS = ["float32", "bfloat16", "nvfp4"]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile first, so that no test carries it."""
    for task in tasks(ExpertsSpec(8), Shapes()):
        task.run()


def gaussian(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Case:
    """Bound weights and, in float64, exactly the weights that they store."""

    weights: ExpertWeights
    w13: torch.Tensor
    w2: torch.Tensor

    def expected(self, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        return routed_reference(x.double(), ids, shares.double(), self.w13, self.w2)


def case(kind: str, experts: int = E, hidden: int = H, inner: int = INNER) -> Case:
    w13 = gaussian(experts, 2 * inner, hidden, seed=1) / hidden**0.5
    w2 = gaussian(experts, hidden, inner, seed=2) / inner**0.5
    if kind == "nvfp4":
        return nvfp4_case(w13, w2)
    dtype = getattr(torch, kind)
    w13, w2 = w13.to(dtype), w2.to(dtype)
    return Case(ExpertWeights.dense(w13, w2), w13.double(), w2.double())


def nvfp4_case(w13: torch.Tensor, w2: torch.Tensor) -> Case:
    """Gate and up of each expert have globals of their own, an awkward factor apart."""
    experts, rows, hidden = w13.shape
    halves = w13.view(experts, 2, rows // 2, hidden) * torch.tensor([1.0, 0.37])[:, None, None]
    q13 = codec.quantise(halves, halves.abs().amax((-1, -2)) / 2688)
    q2 = codec.quantise(w2, w2.abs().amax((-1, -2)) / 2688)
    joined = codec.Packed(q13.codes.flatten(1, 2), q13.scales.flatten(1, 2), q13.global_scale)
    wide13, wide2 = (codec.dequantise(q, torch.float64) for q in (q13, q2))
    return Case(ExpertWeights.nvfp4(joined, q2), wide13.flatten(1, 2), wide2)


def routing(tokens: int, seed: int = 3, experts: int = E) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts drawn with repetition (a token may name one twice) and leaving some unused; any shares."""
    generator = torch.Generator().manual_seed(seed)
    used = torch.randperm(experts, generator=generator)[: max(1, experts - 2)]
    picks = torch.randint(0, len(used), (tokens, TOP), generator=generator)
    shares = torch.rand((tokens, TOP), generator=generator)
    return used[picks].to(torch.int32), shares


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("tokens", [1, 2, 3, 19, 20, 21, 49, 150])
def test_experts_are_right(kind: str, tokens: int) -> None:
    """4 to 600 routed rows with repeated and empty experts: relative L2 against float64 under 1e-6."""
    made = case(kind)
    x = gaussian(tokens, H, seed=4)
    ids, shares = routing(tokens)

    got = RoutedExperts(made.weights, TOP)(x, ids, shares)

    assert relative(got, made.expected(x, ids, shares)) < 1e-6


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("rows", [0, 1, 80, 81])
def test_both_sides_of_the_gate_agree(
    kind: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 0, 1, 80 and 81 routed rows both paths give the same bits (81 in two calls of the compact one)."""
    made = case(kind)
    x = gaussian(rows, H, seed=5)
    ids, shares = (t[:, :1].contiguous() for t in routing(rows))
    free = RoutedExperts(made.weights, 1)
    monkeypatch.setenv("STALLWATCH_KERNEL_MOE_EXPERTS", "grouped")
    grouped = RoutedExperts(made.weights, 1)(x, ids, shares)

    parts = [slice(0, 80), slice(80, None)]
    compact = torch.cat([free(x[part], ids[part], shares[part]) for part in parts])

    assert torch.equal(free(x, ids, shares), grouped)
    assert torch.equal(compact, grouped)
    if rows:
        assert relative(grouped, made.expected(x, ids, shares)) < 1e-6


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("tokens", [63, 64, 65, 129])
def test_one_expert_takes_all(kind: str, tokens: int) -> None:
    """Groups just under, at and over the number of rows that are gathered at once."""
    made = case(kind)
    x = gaussian(tokens, H, seed=20)
    ids, shares = torch.full((tokens, 1), 3, dtype=torch.int32), torch.ones(tokens, 1)

    got = RoutedExperts(made.weights, 1)(x, ids, shares)

    assert relative(got, made.expected(x, ids, shares)) < 1e-6


@pytest.mark.parametrize("tokens", [3, 40])
def test_a_nan_stays_with_its_token(tokens: int) -> None:
    """One token of NaN changes no other token, on either side of the gate."""
    experts = RoutedExperts(case("float32").weights, TOP)
    x = gaussian(tokens, H, seed=21)
    ids, shares = routing(tokens)
    clean = experts(x, ids, shares)
    x[1] = float("nan")

    got = experts(x, ids, shares)

    assert bool(got[1].isnan().all())
    assert torch.equal(got[0], clean[0])
    assert torch.equal(got[2:], clean[2:])


@pytest.mark.parametrize("kind", FORMATS)
def test_layouts_agree(kind: str) -> None:
    """Every row a group of one, equal experts apart, and rows sorted by expert: the same bits."""
    made = case(kind)
    experts = RoutedExperts(made.weights, TOP)
    for tokens in (1, 7, 30):
        x = gaussian(tokens, H, seed=6)
        ids, shares = routing(tokens)
        expected = experts(x, ids, shares)

        assert torch.equal(experts.run(x, slot_layout(ids, E), shares), expected)
        assert torch.equal(experts.run(x, expert_layout(ids, E), shares), expected)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_token_has_the_same_bits_in_every_batch(kind: str) -> None:
    """Any window of 1, 2, 3, 4, 8, 16 or 100 tokens gives each its bits of the batch of 130."""
    experts = RoutedExperts(case(kind).weights, TOP)
    x = gaussian(130, H, seed=7)
    ids, shares = routing(130)
    whole = experts(x, ids, shares)
    for tokens in (1, 2, 3, 4, 8, 16, 100):
        for first in (0, 13, 30):
            window = slice(first, first + tokens)

            assert torch.equal(experts(x[window], ids[window], shares[window]), whole[window])


def test_threads_and_chunks_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns over three threads, tokens in small chunks: the same bits as one thread in one go."""
    made = case("nvfp4")
    x = gaussian(70, H, seed=8)
    ids, shares = routing(70)
    expected = RoutedExperts(made.weights, TOP)(x, ids, shares)
    monkeypatch.setattr("stallwatch_kernels.moe.experts._CHUNK_ROWS", 10 * TOP)
    pool = RowPool(3)
    try:
        experts = RoutedExperts(made.weights, TOP, pool=pool)

        assert torch.equal(experts(x, ids, shares), expected)
        assert torch.equal(experts(x[:2], ids[:2], shares[:2]), expected[:2])
    finally:
        pool.close()


@pytest.mark.parametrize("tokens", [3, 40])
def test_weighted_sum_runs_in_slot_order(tokens: int) -> None:
    """The result is bit for bit ((w0 y0 + w1 y1) + w2 y2) + w3 y3 of the slots computed alone."""
    made = case("nvfp4")
    x = gaussian(tokens, H, seed=22)
    ids, shares = routing(tokens)
    alone, ones = RoutedExperts(made.weights, 1), torch.ones(tokens, 1)
    expected = torch.zeros(tokens, H)
    for slot in range(TOP):
        y = alone(x, ids[:, slot : slot + 1].contiguous(), ones)
        expected = expected + shares[:, slot : slot + 1] * y

    assert torch.equal(RoutedExperts(made.weights, TOP)(x, ids, shares), expected)


@pytest.mark.parametrize("tokens", [3, 90])
def test_bf16_is_rounded_once(tokens: int) -> None:
    """bfloat16 in and out: at most 1 % of elements one unit off the rounded float64 result."""
    made = case("bfloat16", hidden=552, inner=96)
    x = gaussian(tokens, 552, seed=9).bfloat16()
    ids, shares = routing(tokens)
    shares = shares.bfloat16()
    experts = RoutedExperts(made.weights, TOP)

    got = experts(x, ids, shares)

    expected = made.expected(x, ids, shares).bfloat16()
    bits = [t.view(torch.int16).int() for t in (got, expected)]
    a, b = (torch.where(t < 0, -(t & 0x7FFF), t) for t in bits)
    assert int((a - b).abs().max()) <= 1
    assert float((a != b).double().mean()) <= 0.01
    wide = torch.empty(tokens, 552)
    assert torch.equal(experts(x, ids, shares, wide).bfloat16(), got)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 5, 200])
def test_block_agrees_with_transformers(tokens: int) -> None:
    """Router, routed experts and shared expert together are transformers' MoE block on the tiny checkpoint."""
    block = tiny_model().model.layers[1].mlp
    shared = block.shared_expert
    x = gaussian(tokens, 64, seed=10)
    with torch.no_grad():
        expected = block(x[None])[0]
        logits = Linear(block.gate.weight)(x)
        shares, ids = route(logits, block.gate.top_k)
        weights = ExpertWeights.dense(
            block.experts.gate_up_proj.detach(), block.experts.down_proj.detach()
        )
        out = RoutedExperts(weights, block.gate.top_k)(x, ids, shares)
        routed = out.clone()
        both = torch.cat((shared.gate_proj.weight, shared.up_proj.weight))
        layers = (both, shared.down_proj.weight, block.shared_expert_gate.weight)
        SharedExpert(*(Linear(weight.detach()) for weight in layers)).add_to(out, x)

    assert relative(out, expected.double()) < 1e-6
    assert relative(routed, expected.double()) > 0.1, "the shared expert must matter"


def test_shared_expert_is_batch_invariant() -> None:
    """A row of the shared expert has the same bits alone and among others."""
    layers = (gaussian(96, H, seed=11), gaussian(H, 48, seed=12), gaussian(1, H, seed=13))
    shared = SharedExpert(*(Linear(weight) for weight in layers))
    x = gaussian(16, H, seed=14)
    whole = shared.add_to(torch.zeros(16, H), x)
    for rows in (1, 2, 3, 4, 8):
        assert torch.equal(shared.add_to(torch.zeros(rows, H), x[:rows]), whole[:rows])


def test_shared_expert_refuses_layers_that_do_not_fit() -> None:
    """A gate of two outputs is named before anything is computed."""
    layers = (gaussian(96, H, seed=11), gaussian(H, 48, seed=12), gaussian(2, H, seed=13))
    with pytest.raises(BadMetadata, match="gate"):
        SharedExpert(*(Linear(weight) for weight in layers))


def test_expert_layout_is_a_stable_sort() -> None:
    """Groups ascend, rows of a group keep their order, offsets of unused groups equal the total."""
    ids = torch.tensor([[5, 2], [2, 5], [2, 0]], dtype=torch.int32)
    groups = expert_layout(ids, 7)

    assert groups.order.tolist() == [5, 1, 2, 4, 0, 3]
    assert groups.experts[:3].tolist() == [0, 2, 5]
    assert groups.offsets.tolist() == [0, 1, 4, 6, 6, 6, 6]


def bad_groups(**changes: list[int]) -> Groups:
    """A legal layout of four routed rows, two groups, with parts replaced."""
    parts = {"order": [0, 2, 1, 3], "experts": [1, 4], "offsets": [0, 2, 4]}
    return Groups(**{k: np.array(v, np.int32) for k, v in {**parts, **changes}.items()})


@pytest.mark.parametrize(
    ("groups", "error"),
    [
        (bad_groups(offsets=[0, 3, 3]), BadMetadata),
        (bad_groups(offsets=[1, 2, 4]), BadMetadata),
        (bad_groups(offsets=[0, 5, 4]), BadMetadata),
        (bad_groups(offsets=[0, 4]), BadMetadata),
        (bad_groups(order=[0, 1, 2]), BadMetadata),
        (bad_groups(order=[0, 1, 1, 3]), BadMetadata),
        (bad_groups(order=[0, 1, 2, 4]), BadMetadata),
        (bad_groups(order=[0, 1, 2, -1]), BadMetadata),
        (bad_groups(experts=[1, E]), BadIndex),
        (bad_groups(experts=[-1, 4]), BadIndex),
    ],
)
def test_inconsistent_groups_are_refused(groups: Groups, error: type[KernelRefused]) -> None:
    """Offsets that decrease, do not start at 0 or miss the total, rows lost or doubled, unknown experts."""
    experts = RoutedExperts(case("float32").weights, 1)
    out = torch.full((4, H), 7.0)

    experts.run(gaussian(4, H, seed=15), bad_groups(), torch.ones(4, 1))
    with pytest.raises(error):
        experts.run(gaussian(4, H, seed=15), groups, torch.ones(4, 1), out)
    assert bool((out == 7.0).all())


@pytest.mark.parametrize("bad", [-1, E, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("tokens", [2, 40])
def test_expert_ids_out_of_range_are_refused(bad: int, tokens: int) -> None:
    """An id that names no expert is refused on both sides of the gate, and `out` is untouched."""
    experts = RoutedExperts(case("float32").weights, TOP)
    ids, shares = routing(tokens)
    ids[1, 2] = bad
    out = torch.full((tokens, H), 7.0)

    with pytest.raises(BadIndex, match=str(bad)):
        experts(gaussian(tokens, H, seed=16), ids, shares, out)
    assert bool((out == 7.0).all())


def test_bad_input_is_refused_by_name() -> None:
    """Types, shapes and layouts of a call."""
    experts = RoutedExperts(case("float32").weights, TOP)
    x = gaussian(2, H, seed=17)
    ids, shares = routing(2)
    with pytest.raises(BadShape, match="x"):
        experts(x[:, :-1], ids, shares)
    with pytest.raises(BadShape, match="ids"):
        experts(x, ids[:1], shares)
    with pytest.raises(BadDtype, match="int32"):
        experts(x, ids.long(), shares)
    with pytest.raises(BadDtype, match="float64"):
        experts(x.double(), ids, shares)
    with pytest.raises(BadShape, match="out"):
        experts(x, ids, shares, torch.empty(3, H))
    with pytest.raises(BadLayout, match="contiguous"):
        experts(gaussian(H, 2, seed=18).T, ids, shares)
    with pytest.raises(BadMetadata, match="top_k"):
        RoutedExperts(case("float32").weights, E + 1)


def test_weights_that_contradict_each_other_are_refused() -> None:
    """Shapes of w13 and w2, formats, a NaN scale and globals of the wrong number are refused when bound."""
    w13, w2 = gaussian(E, 2 * INNER, H, seed=1), gaussian(E, H, INNER, seed=2)
    with pytest.raises(BadMetadata, match="w2"):
        ExpertWeights.dense(w13, w2[:, :, :-16].contiguous())
    with pytest.raises(BadMetadata, match="w2"):
        ExpertWeights.dense(w13, w2[:-1])
    with pytest.raises(BadDtype):
        ExpertWeights.dense(w13.half(), w2.half())
    with pytest.raises(BadLayout):
        ExpertWeights.dense(w13.transpose(1, 2), w2)
    q13, q2 = codec.quantise(w13), codec.quantise(w2, torch.ones(E))
    with pytest.raises(BadShape, match="global"):
        ExpertWeights.nvfp4(q13, q2)
    q13 = codec.Packed(q13.codes, q13.scales, torch.ones(E, 2))
    ExpertWeights.nvfp4(q13, q2)
    q2.scales.view(torch.uint8)[3, 1, 0] = 0x7F
    with pytest.raises(BadScale, match="NaN"):
        ExpertWeights.nvfp4(q13, q2)


def test_admission_counts_routed_rows() -> None:
    """80 routed rows are compact, 81 are not; the reason says so."""

    def chosen(rows: int, threads: int = 1) -> tuple[str, str]:
        spec = ExpertsSpec(rows, threads)
        choice = choose("moe-experts", candidates(spec), environ={})
        return choice.impl, choice.reason

    assert chosen(80)[0] == "compact"
    assert chosen(81)[0] == "grouped"
    assert "80" in chosen(81)[1]
    assert chosen(8, threads=2)[0] == "grouped"


def test_nothing_is_compiled_after_warm_up() -> None:
    """Served calls of any shape and format on both sides of the gate find every signature present."""
    for task in tasks(ExpertsSpec(8), Shapes()):
        task.run()
    before = jit.signatures()
    for kind in FORMATS:
        experts = RoutedExperts(case(kind).weights, TOP)
        for tokens in (1, 5, 60):
            experts(gaussian(tokens, H, seed=19), *routing(tokens))

    assert jit.signatures() == before
