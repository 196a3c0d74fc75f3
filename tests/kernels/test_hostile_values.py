"""NaN, infinity, huge and subnormal numbers, wrong types, strides and read-only memory, for every op."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
import torch

from kernel_ops import OPS, Draw, gather
from stallwatch_kernels.errors import Busy, KernelRefused
from stallwatch_kernels.gdn.batch import Carried
from stallwatch_kernels.gdn.recurrence import GatedDeltaRule, Inputs
from stallwatch_kernels.gdn.reference import Heads
from stallwatch_kernels.hc.mixer import Mixer
from stallwatch_kernels.hc.reference import Weights
from stallwatch_kernels.linear.skinny import Linear
from stallwatch_kernels.moe.experts import RoutedExperts
from stallwatch_kernels.moe.route import route
from stallwatch_kernels.moe.weights import ExpertWeights
from stallwatch_kernels.norm.rms import GatedRmsNorm, RmsNorm
from stallwatch_kernels.ple.gate import Gate, GateWeights
from stallwatch_kernels.pool import OneAtATime, RowPool
from stallwatch_kernels.qsa import indexer, page4, reference, select, synthetic
from stallwatch_kernels.qsa.indexer import KeyCache, Where
from stallwatch_kernels.qsa.layout import PagedKV
from stallwatch_kernels.qsa.synthetic import Mix

pytestmark = pytest.mark.slow  # a first run compiles every kernel

IMPLS: list[page4.Impl] = ["grouped", "ungrouped"]
FLOATS = [op for op in OPS if op is not gather]  # what a gather takes are ids


@pytest.fixture
def draw() -> Draw:
    """Normal numbers that differ from run to run and come back with its seed (-p randomly)."""
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    return lambda *shape: torch.randn(*shape, generator=generator)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def attention(mix: Mix, heads: int = 6) -> tuple[torch.Tensor, PagedKV, page4.Rows]:
    spec = (2, 32, 8)
    return (
        synthetic.queries(heads, 32, mix),
        synthetic.caches(spec, mix),
        synthetic.rows(8, mix),
    )


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("make", FLOATS, ids=lambda op: op.__name__)
def test_a_poisoned_row_poisons_no_other(make, poison: float, draw: Draw) -> None:
    """NaN or infinity in every float input of one row changes not one bit of its neighbours."""
    op = make(9, torch.float32, draw)
    clean = op.of(9)
    for x in op.inputs:
        if x.is_floating_point():
            x[4] = poison
    others = torch.arange(9) != 4

    assert torch.equal(op.of(9)[others], clean[others])


@pytest.mark.parametrize("make", FLOATS, ids=lambda op: op.__name__)
def test_nan_is_never_swallowed(make, draw: Draw) -> None:
    """A row of NaN gives a row of NaN: a broken activation must not look like a number."""
    op = make(3, torch.float32, draw)
    for x in op.inputs:
        if x.is_floating_point():
            x[1] = float("nan")

    assert bool(op.of(3)[1].isnan().all())


@pytest.mark.parametrize("size", [1e-40, 1e-30, 1e12])
@pytest.mark.parametrize("make", FLOATS, ids=lambda op: op.__name__)
def test_tiny_and_huge_numbers_stay_finite(make, size: float, draw: Draw) -> None:
    """Subnormal inputs, and those whose third powers float32 still holds, give finite results."""
    op = make(5, torch.float32, draw)
    for x in op.inputs:
        if x.is_floating_point():
            x.mul_(size)

    assert bool(op.of(5).isfinite().all())


@pytest.mark.parametrize("make", OPS, ids=lambda op: op.__name__)
def test_strided_rows_give_the_same_bits_or_are_refused(make, draw: Draw) -> None:
    """Every other row of a matrix, and its columns backwards in memory: right, or a named error."""
    op = make(6, torch.float32, draw)
    expected = op.of(6)

    def spread(x: torch.Tensor) -> torch.Tensor:
        wide = x.new_zeros(2 * len(x), *x.shape[1:])
        wide[::2] = x
        return wide[::2]

    def turned(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1).contiguous().transpose(0, 1) if x.ndim > 1 else x

    for other in (spread, turned):
        try:
            found = op.ours(*(other(x) for x in op.inputs))
        except KernelRefused:
            continue
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int32, torch.complex64])
@pytest.mark.parametrize("make", FLOATS, ids=lambda op: op.__name__)
def test_other_types_are_refused_by_name(make, dtype: torch.dtype, draw: Draw) -> None:
    """float64 would lose its digits, and float16 is nobody's activation here: named errors, never a cast."""
    op = make(3, torch.float32, draw)
    first, *rest = op.inputs
    with pytest.raises(KernelRefused):
        op.ours(first.to(dtype), *rest)


@pytest.mark.parametrize("impl", IMPLS)
def test_attention_passes_nan_to_its_own_row_alone(impl: page4.Impl) -> None:
    """A NaN query shows in its row and head; the seven rows of its group do not change."""
    q, kv, rows = attention(Mix(16))
    clean, _ = page4.attend(q, kv, rows, impl=impl)
    q[3, 2] = float("nan")
    found, _ = page4.attend(q, kv, rows, impl=impl)
    others = torch.ones(16, 6, dtype=torch.bool)
    others[3, 2] = False

    assert bool(found[3, 2].isnan().all())
    assert torch.equal(found[others], clean[others])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("size", [1e9, 1e15, 1e30])
def test_attention_of_huge_logits_is_a_choice_of_values(impl: page4.Impl, size: float) -> None:
    """Beyond what an exponent of float32 can tell apart, each row is still a mean of values, never NaN."""
    q, kv, rows = attention(Mix(16))
    found, _ = page4.attend(q * size, kv, rows, impl=impl)

    assert bool(found.isfinite().all())
    assert float(found.abs().max()) <= float(kv.v.abs().max()) * 1.0001


@pytest.mark.parametrize("impl", IMPLS)
def test_attention_of_one_dominant_token_is_its_value(impl: page4.Impl) -> None:
    """One key along the query and the others against it, logits near 2**40: the output is that value."""
    q, kv, rows = attention(Mix(16))
    q = torch.ones_like(q)
    k = torch.full_like(kv.k, -1e9)
    token = rows.indices[:, 0]
    page = rows.page_table[0, token.long() // 8].long()
    k[page, token.long() % 8] = 1e10
    lone = page4.replace(rows, indices=rows.indices.clone())
    lone.indices[:, 1:] = torch.where(
        lone.indices[:, 1:] == token[:, None], -1, lone.indices[:, 1:]
    )
    once = (rows.indices[:, :, None] == token.unique()[None, None]).sum((1, 2)) == 1
    found, _ = page4.attend(q, PagedKV(k, kv.v), rows, impl=impl)
    expected = kv.v[page, token.long() % 8].repeat_interleave(3, 1)

    assert bool(once.any())
    assert torch.equal(found[once], expected[once])


@pytest.mark.parametrize("impl", IMPLS)
def test_attention_without_pages_or_columns_is_zero(impl: page4.Impl) -> None:
    """No page in the cache, no column in the table, no index: rows of zeros."""
    q, kv, rows = attention(Mix(9))
    bare = PagedKV(kv.k[:0], kv.v[:0])
    none = page4.replace(rows, page_table=torch.zeros(1, 0).int())
    nothing = page4.replace(rows, indices=torch.zeros(9, 0).int())
    for call in ((q, bare, rows), (q, kv, none), (q, kv, nothing)):
        found, _ = page4.attend(*call, impl=impl)
        assert bool(found.eq(0).all())
    empty = {n: getattr(rows, n)[:0] for n in ("row_req", "row_pos", "indices", "counts")}
    found, _ = page4.attend(q[:0], kv, page4.replace(rows, **empty), impl=impl)
    assert found.shape == (0, 6, 32)


def test_attention_writes_where_it_is_told() -> None:
    """`out` is filled and returned, in q's type, by every implementation; another shape or type is refused."""
    q, kv, rows = attention(Mix(9))
    for dtype in (torch.float32, torch.bfloat16):
        for impl in (*IMPLS, "reference"):
            out = torch.full(q.shape, 9.0, dtype=dtype)
            found, _ = page4.attend(q.to(dtype), kv, rows, impl=impl, out=out)
            expected, _ = page4.attend(q.to(dtype), kv, rows, impl=impl)
            assert found is out
            assert torch.equal(out, expected)
    bad = (torch.empty(9, 6, 16), torch.empty(9, 6, 32).bfloat16(), torch.empty(6, 9, 32).mT.mT)
    for out in (*bad, torch.empty(32, 6, 9).transpose(0, 2)):
        with pytest.raises(KernelRefused):
            page4.attend(q, kv, rows, out=out)


def test_selection_of_nan_scores_is_still_a_selection() -> None:
    """NaN and infinite keys: every row lists its number of tokens, distinct, ascending and visible."""
    generator = torch.Generator().manual_seed(2)
    keys = torch.randn(1, 64, 16, generator=generator)
    keys[0, 5], keys[0, 9], keys[0, 40] = float("nan"), float("inf"), float("-inf")
    where = Where(torch.zeros(8).int(), torch.arange(200, 208).int(), ints(256))
    q = torch.randn(8, 2, 16, generator=generator)
    indices, counts = select.select(q, KeyCache(keys, ints(0).view(1, 1)), where, budget=32)
    scores = indexer.score(q, KeyCache(keys, ints(0).view(1, 1)), where)

    assert bool(scores[:, 5].isnan().all())
    for row in range(8):
        tokens = indices[row, : int(counts[row])]
        assert int(counts[row]) == 32 + (200 + row + 1) % 4
        assert bool((tokens.diff() > 0).all())
        assert int(tokens.max()) <= 200 + row
        assert 20 in tokens.tolist()  # NaN counts as the greatest: it must not hide


@pytest.mark.parametrize("logit", [1e30, float("inf"), float("-inf"), -1e30])
def test_routing_survives_extreme_logits(logit: float) -> None:
    """Experts exist and are distinct; weights are a distribution where softmax has one, else NaN."""
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    logits[1, 3] = logit
    weights, experts = route(logits, 3)

    assert all(len(set(row)) == 3 for row in experts.tolist())
    assert bool(((experts >= 0) & (experts < 8)).all())
    if logit == float("inf"):
        assert bool(weights[1].isnan().all())
    else:
        assert torch.allclose(weights.sum(-1), torch.ones(3))


def test_gates_saturate() -> None:
    """Decay and strength of +-1e30 and 0 keys: the state is kept, forgotten or written, and stays finite."""
    heads = Heads(1, 1, 16, 16)
    rule = GatedDeltaRule(heads, torch.zeros(1), torch.zeros(1))
    state = torch.ones(1, 1, 16, 16)
    qkv = torch.ones(4, heads.width)
    qkv[1] = 0
    a = torch.tensor([[-1e30], [1e30], [0.0], [30.0]])
    b = torch.tensor([[-1e30], [1e30], [1e30], [-1e30]])
    first = rule(Inputs(qkv[:1], a[:1], b[:1]), Carried(state, ints(0), ints(0, 1)))
    kept = state.clone()
    rest = rule(Inputs(qkv[1:], a[1:], b[1:]), Carried(state, ints(0), ints(0, 3)))

    assert bool(kept.eq(1).all())
    assert bool(first.isfinite().all() and rest.isfinite().all())
    assert bool(state.isfinite().all())
    assert bool(rest[0].eq(0).all())


@pytest.mark.parametrize("eps", [0.0, -1e-6, float("nan"), float("inf")])
def test_an_eps_that_is_none_is_refused(eps: float) -> None:
    """Every norm wants a finite positive eps, and says so when it is made."""
    made = [
        lambda: RmsNorm(torch.zeros(4), eps),
        lambda: GatedRmsNorm(torch.zeros(4), eps),
        lambda: Mixer(Weights(torch.zeros(2, 4), torch.zeros(4, 2), torch.zeros(4), None, 2, eps)),
        lambda: GateWeights(torch.zeros(4), torch.zeros(4), torch.zeros(4), 2, eps),
        lambda: indexer.rms_norm(torch.zeros(1, 4), torch.zeros(4), eps),
    ]
    for make in made:
        with pytest.raises(KernelRefused, match="eps"):
            make()


def test_read_only_memory_serves_as_weights_and_caches(tmp_path: Path) -> None:
    """Weights and caches mapped read-only from files give the bits of those in RAM."""

    def mapped(tensor: torch.Tensor, name: str) -> torch.Tensor:
        tensor.numpy().tofile(tmp_path / name)
        size = tensor.numel()
        flat = torch.from_file(str(tmp_path / name), shared=False, size=size, dtype=tensor.dtype)
        (tmp_path / name).chmod(0o400)
        return flat.view(tensor.shape)

    q, kv, rows = attention(Mix(9))
    there = PagedKV(mapped(kv.k, "k"), mapped(kv.v, "v"))
    weight, x = torch.randn(8, 32), torch.randn(3, 32)

    assert torch.equal(Linear(mapped(weight, "w"))(x), Linear(weight)(x))
    for impl in IMPLS:
        expected, _ = page4.attend(q, kv, rows, impl=impl)
        assert torch.equal(page4.attend(q, there, rows, impl=impl)[0], expected)


def test_linear_layers_are_shared_by_threads(draw: Draw) -> None:
    """Two threads in one linear layer, each with its own rows: each gets its own result."""
    layer = Linear(draw(64, 96))
    inputs = [draw(3, 96) for _ in range(2)]
    expected = [layer(x) for x in inputs]
    wrong: list[int] = []

    def work(which: int) -> None:
        results = (layer(inputs[which]) for _ in range(200))
        wrong.extend(which for found in results if not torch.equal(found, expected[which]))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


def test_two_threads_in_one_object_with_buffers_never_mix(draw: Draw) -> None:
    """Routed experts called by two threads: each call is right, or refused as busy, and none is mixed."""
    experts = RoutedExperts(ExpertWeights.dense(draw(4, 512, 256) / 16, draw(4, 256, 256) / 16), 2)
    inputs = [(draw(8, 256), *reversed(route(draw(8, 4), 2))) for _ in range(2)]
    expected = [experts(*call) for call in inputs]
    wrong: list[int] = []
    right = [0, 0]

    def work(which: int) -> None:
        for _ in range(100):
            try:
                found = experts(*inputs[which])
            except Busy:
                continue
            right[which] += 1
            if not torch.equal(found, expected[which]):
                wrong.append(which)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert not wrong
    assert sum(right) > 0


def test_the_guard_opens_again_after_an_error() -> None:
    """A second entry is refused by name, and after a failed call the object serves on."""
    guard = OneAtATime("moe-experts")
    with guard, pytest.raises(Busy, match="moe-experts"):
        guard.__enter__()
    with pytest.raises(ZeroDivisionError), guard:
        _ = 1 / 0
    with guard:
        pass


def test_an_error_in_one_thread_of_a_pool_reaches_the_caller() -> None:
    """The first error of any part is raised once all parts have ended, and the pool serves on."""
    pool = RowPool(2)
    ended: list[int] = []

    def work(lo: int, _hi: int) -> None:
        ended.append(lo)
        if lo:
            raise ValueError("part")

    try:
        with pytest.raises(ValueError, match="part"):
            pool.run(work, 10)
        pool.run(lambda lo, _hi: ended.append(lo), 10)
    finally:
        pool.close()

    assert sorted(ended) == [0, 0, 5, 5]


def test_one_pool_serves_two_callers(draw: Draw) -> None:
    """Two threads that share a pool of two each get the result of their own rows."""
    pool = RowPool(2)
    layers = [Linear(draw(256, 96), pool=pool) for _ in range(2)]
    x = draw(3, 96)
    expected = [layer(x) for layer in layers]
    wrong: list[int] = []

    def work(which: int) -> None:
        results = (layers[which](x) for _ in range(100))
        wrong.extend(which for found in results if not torch.equal(found, expected[which]))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
    finally:
        pool.close()

    assert not wrong


def test_the_reference_agrees_that_nothing_is_zero() -> None:
    """The float64 judge itself gives zeros, not NaN, for rows that read nothing."""
    q, kv, rows = attention(Mix(3))
    nothing = page4.replace(rows, counts=torch.zeros(3).int())

    assert bool(reference.attend(q, kv, nothing).eq(0).all())


def test_padding_of_a_gate_hides_what_lies_there() -> None:
    """Rows beyond `tokens` come out zero although they hold NaN."""
    weights = GateWeights(*(torch.zeros(8),) * 3, 2)
    wide = torch.full((3, 8), float("nan"))
    wide[0] = 1
    u, c = Gate(weights)(wide, wide[:, :4], wide, tokens=1)

    assert bool(u[0].isfinite().all() and c[0].isfinite().all())
    assert bool(u[1:].eq(0).all() and c[1:].eq(0).all())
