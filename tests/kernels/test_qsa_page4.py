"""page4: grouped = ungrouped = dense = float64, in every type, for every odd row; pages and batches change no bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import oracle
from stallwatch_kernels.errors import BadDtype, BadLayout, BadMetadata, BadScale, BadShape
from stallwatch_kernels.pool import RowPool
from stallwatch_kernels.qsa import page4, reference, select, synthetic
from stallwatch_kernels.qsa.indexer import KeyCache, Norm, Where, extend
from stallwatch_kernels.qsa.layout import PagedKV, Rows
from stallwatch_kernels.qsa.rotary import Rotary, rms_norm, rotate
from stallwatch_kernels.qsa.synthetic import Mix

IMPLS: list[page4.Impl] = ["grouped", "ungrouped"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
SMALL = (2, 32, 8)  # KV heads, head size, tokens per page


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def case(
    mix: Mix, dtype: torch.dtype = torch.float32, heads: int = 6, spec: tuple[int, int, int] = SMALL
) -> tuple[torch.Tensor, PagedKV, Rows]:
    kv = synthetic.caches(spec, mix, dtype)
    if dtype == torch.float8_e4m3fn:
        kv = replace(kv, k_scale=0.75, v_scale=1.5)
    return synthetic.queries(heads, spec[1], mix), kv, synthetic.rows(spec[2], mix)


def run(impl: page4.Impl, call: tuple[torch.Tensor, PagedKV, Rows]) -> torch.Tensor:
    out, settled = page4.attend(*call, impl=impl)
    assert settled.impl == impl
    return out


def changed(rows: Rows, **tensors: torch.Tensor) -> Rows:
    return replace(rows, **tensors)


def cut(
    call: tuple[torch.Tensor, PagedKV, Rows], lo: int, hi: int
) -> tuple[torch.Tensor, PagedKV, Rows]:
    q, kv, rows = call
    part = {
        name: getattr(rows, name)[lo:hi].contiguous()
        for name in ("row_req", "row_pos", "indices", "counts")
    }
    return q[lo:hi].contiguous(), kv, changed(rows, **part)


@pytest.mark.slow
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 7, 8, 9, 49, 64, 185])
def test_every_row_count_equals_float64(count: int, dtype: torch.dtype, impl: page4.Impl) -> None:
    """Full groups and remainders equal the float64 reference on the same stored codes to 1e-6."""
    call = case(Mix(count, requests=min(count, 3), seed=count), dtype)

    assert error(run(impl, call), reference.attend(*call)) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("impl", IMPLS)
def test_4096_rows_equal_float64(impl: page4.Impl) -> None:
    """A prefill-sized call equals the reference to 1e-6."""
    call = case(Mix(4096, context=128, budget=32, requests=5), heads=2, spec=(1, 16, 4))

    assert error(run(impl, call), reference.attend(*call)) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_served_shape_equals_float64(dtype: torch.dtype, impl: page4.Impl) -> None:
    """Hq 6, Hkv 1, D 256, page 16, budget 2048: the whole row width, error to 1e-6."""
    call = case(Mix(9, context=4096, budget=2048), dtype, spec=(1, 256, 16))

    assert error(run(impl, call), reference.attend(*call)) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 6, 8, 12, 14])
def test_every_number_of_heads_equals_float64(heads: int) -> None:
    """Heads are covered by tiles of 6, 4, 2 and 1; columns by tiles of 64 and 16."""
    for size in (16, 48, 80, 128):
        call = case(Mix(9), heads=heads, spec=(1, size, 4))
        expected = reference.attend(*call)
        for impl in IMPLS:
            assert error(run(impl, call), expected) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("impl", IMPLS)
def test_dense_masked_attention_of_torch_agrees(impl: page4.Impl) -> None:
    """torch's attention over all tokens under a mask gives the same rows."""
    call = case(Mix(17))

    assert error(run(impl, call), reference.dense(*call).double()) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("impl", IMPLS)
def test_16_bit_results_are_rounded_once(dtype: torch.dtype, impl: page4.Impl) -> None:
    """In q's type at most 1 % of elements differ from the rounded float64 result, each by one ulp."""
    q, kv, rows = case(Mix(49), dtype)
    call = (q.to(dtype), kv, rows)
    got, expected = run(impl, call), reference.attend(*call).to(dtype)
    steps = (got.view(torch.int16).int() - expected.view(torch.int16).int()).abs()
    near_zero = (got * expected < 0) & (got.abs() < 1e-6)  # bit patterns do not count across zero

    assert got.dtype == dtype
    assert int(steps[~near_zero].max()) <= 1
    assert float((steps > 0).float().mean()) <= 0.01


@pytest.mark.slow
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_page_placement_changes_no_bit(dtype: torch.dtype, impl: page4.Impl) -> None:
    """The same contents in other physical pages give identical bits."""
    q, kv, rows = case(Mix(17, requests=2), dtype)
    before = run(impl, (q, kv, rows))
    for seed in range(3):
        if dtype == torch.float8_e4m3fn:  # torch cannot index-copy float8: move the codes
            bits = replace(kv, k=kv.k.view(torch.uint8), v=kv.v.view(torch.uint8))
            other, table = synthetic.moved(bits, rows, seed)
            other = replace(other, k=other.k.view(dtype), v=other.v.view(dtype))
        else:
            other, table = synthetic.moved(kv, rows, seed)
        assert torch.equal(run(impl, (q, other, table)), before)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_bits_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    """Ungrouped: bitwise equal at M = 1, 2, 3, 4, 8, wherever the row stands, and over two threads."""
    call = case(Mix(8, requests=3), dtype)
    whole = run("ungrouped", call)
    pool = RowPool(2)
    try:
        threaded, _ = page4.attend(*call, impl="ungrouped", pool=pool)
    finally:
        pool.close()

    assert torch.equal(threaded, whole)
    for many in (1, 2, 3, 4):
        for lo in range(0, 8 - many + 1, many):
            assert torch.equal(run("ungrouped", cut(call, lo, lo + many)), whole[lo : lo + many])


@pytest.mark.slow
def test_grouped_is_deterministic_over_threads() -> None:
    """Groups give the same bits in one thread and in two, and in every run."""
    call = case(Mix(40, requests=3))
    pool = RowPool(2)
    try:
        threaded, _ = page4.attend(*call, impl="grouped", pool=pool)
    finally:
        pool.close()

    assert torch.equal(threaded, run("grouped", call))
    assert torch.equal(run("grouped", call), run("grouped", call))


@pytest.mark.slow
@pytest.mark.parametrize("impl", IMPLS)
def test_whatever_points_nowhere_contributes_nothing(impl: page4.Impl) -> None:
    """-1, stale tokens, pages and requests out of range drop out; rows left with nothing are zeros."""
    q, kv, rows = case(Mix(19, requests=3))
    generator = torch.Generator().manual_seed(8)
    indices = rows.indices.clone()
    indices[torch.rand(indices.shape, generator=generator) < 0.3] = -1
    indices[1], indices[2, 5] = -1, 2**31 - 1
    indices[3, 7] = -(2**31)
    table = rows.page_table.clone()
    table[0, 3], table[0, 7], table[1, 2] = -1, 10_000, 2**31 - 1
    request, counts = rows.row_req.clone(), rows.counts.clone()
    request[4], request[5], request[18] = -1, 3, 2**31 - 1
    counts[6], counts[7], counts[8] = 0, -3, 10_000
    length = rows.seq_len.clone()
    length[1], length[2] = 100, 0
    position = rows.row_pos.clone()
    position[9] = -5
    odd = changed(
        rows,
        indices=indices,
        page_table=table,
        row_req=request,
        counts=counts,
        seq_len=length,
        row_pos=position,
    )
    expected = reference.attend(q, kv, odd)
    empty = expected.flatten(1).eq(0).all(1)
    got = run(impl, (q, kv, odd))

    assert error(got, expected) <= 1e-6
    assert bool(got[empty].eq(0).all())
    assert {1, 4, 5, 6, 7, 9, 18} <= set(empty.nonzero()[:, 0].tolist())
    assert int(empty.sum()) < 19


@pytest.mark.slow
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_garbage_in_tokens_nobody_selected_never_leaks(
    dtype: torch.dtype, impl: page4.Impl
) -> None:
    """Unselected neighbours inside a read block may hold NaN, as reused pages do: results stay the same."""
    q, kv, rows = case(Mix(17), dtype)
    drop = torch.rand(rows.indices.shape, generator=torch.Generator().manual_seed(1)) < 0.3
    rows = changed(rows, indices=torch.where(drop, -1, rows.indices))
    read = torch.zeros(kv.k.shape[:2], dtype=torch.bool).flatten()
    for row in range(17):
        read[reference.tokens_of(kv, rows, row)] = True
    before = run(impl, (q, kv, rows))
    bits = torch.int32 if dtype == torch.float32 else torch.uint8
    nan = 0x7FC00000 if dtype == torch.float32 else 0x7F
    dirty = [c.clone().view(bits).flatten(0, 1) for c in (kv.k, kv.v)]
    for cache in dirty:
        cache[~read] = nan
    k, v = (c.view(kv.k.shape).view(dtype) for c in dirty)

    assert not bool(read.all())
    assert torch.equal(run(impl, (q, replace(kv, k=k, v=v), rows)), before)


@pytest.mark.slow
@pytest.mark.parametrize("impl", IMPLS)
def test_every_e4m3_code_is_read_as_torch_reads_it(impl: page4.Impl) -> None:
    """One token per row makes the output that token's value: all 254 numbers exact, both NaN codes NaN."""
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    k = torch.zeros(64, 4, 1, 16, dtype=torch.uint8)
    v = codes.view(64, 4, 1, 1).expand(64, 4, 1, 16).contiguous()
    kv = PagedKV(k.view(torch.float8_e4m3fn), v.view(torch.float8_e4m3fn))
    tokens = torch.arange(256, dtype=torch.int32)
    indices = torch.full((256, 7), -1, dtype=torch.int32)
    indices[:, 0] = tokens
    rows = Rows(
        torch.arange(64, dtype=torch.int32)[None],
        torch.zeros(256, dtype=torch.int32),
        torch.full((256,), 255, dtype=torch.int32),
        torch.tensor([256], dtype=torch.int32),
        indices,
        torch.ones(256, dtype=torch.int32),
    )
    got = run(impl, (torch.randn(256, 6, 16), kv, rows))
    expected = codes.view(torch.float8_e4m3fn).float()[:, None, None].expand(256, 6, 16)

    assert torch.equal(got.nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9))
    assert int(got[:, 0, 0].isnan().sum()) == 2


@pytest.mark.slow
@pytest.mark.parametrize("impl", IMPLS)
def test_large_scores_neither_overflow_nor_vanish(impl: page4.Impl) -> None:
    """Queries a hundred times too large leave one token per row, as softmax says, and no NaN."""
    q, kv, rows = case(Mix(9))
    call = (q * 100, kv, rows)

    assert error(run(impl, call), reference.attend(*call)) <= 1e-5
    assert bool(run(impl, (q * 1e6, kv, rows)).isfinite().all())


@pytest.mark.slow
def test_interleaved_keys_and_values_are_read_in_place() -> None:
    """k and v may be views of one tensor with any stride over pages, tokens and heads."""
    q, kv, rows = case(Mix(17))
    both = torch.stack((kv.k, kv.v), 3)  # [pages, page, Hkv, 2, D]
    views = PagedKV(both[:, :, :, 0], both[:, :, :, 1])

    for impl in IMPLS:
        assert torch.equal(run(impl, (q, views, rows)), run(impl, (q, kv, rows)))


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 2, 8, 32])
def test_chunks_change_the_rounding_only(chunk: int) -> None:
    """Every chunk size stays within the bar."""
    q, kv, rows = case(Mix(9))
    call = page4.prepare(q, kv, rows)
    call.ungrouped(0, 9, chunk)

    assert error(call.out, reference.attend(q, kv, rows)) <= 1e-6


@pytest.mark.slow
def test_the_layer_of_transformers_comes_out() -> None:
    """Our projections' order, indexer, selection and grouped attention over shuffled pages reproduce a whole
    attention layer of transformers on a prompt where most rows drop blocks."""
    model = oracle.tiny_model()
    layer: Any = model.model.layers[1].self_attn
    length = 185
    ids = torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(11))
    with torch.inference_mode(), oracle.stable_ties(), oracle.recorded(layer) as calls:
        model(input_ids=ids)
    call = calls[0]
    x = (call.args[0] if call.args else call.kwargs["hidden_states"])[0]
    expected = call.output[0][0]
    rotary = Rotary(16, 10000.0, length)
    zero, positions = (
        torch.zeros(length, dtype=torch.int32),
        torch.arange(length, dtype=torch.int32),
    )
    with torch.inference_mode():
        turn = rotary.at(positions, x.dtype)
        both = layer.q_proj(x).view(length, 4, 64)
        q = rotate(rms_norm(both[..., :32], layer.q_norm.weight), *turn)
        k = rotate(rms_norm(layer.k_proj(x).view(length, 2, 32), layer.k_norm.weight), *turn)
        v = layer.v_proj(x).view(length, 2, 32)
        iq, raw = layer.indexer.index_qk_proj(x).split([64, 16], -1)
        iq = rotate(rms_norm(iq.reshape(length, 4, 16), layer.indexer.q_layernorm.weight), *turn)
        where = Where(zero, positions, torch.tensor([length], dtype=torch.int32))
        keys = KeyCache(torch.zeros(1, 64, 16), torch.zeros(1, 1, dtype=torch.int32))
        norm = Norm(layer.indexer.k_layernorm.weight, rotary)
        extend(raw.contiguous().clone(), torch.zeros(1, 4, 16), keys, where, norm=norm)
        indices, counts = select.select(iq, keys, where, budget=32)
        table = torch.randperm(15, generator=torch.Generator().manual_seed(12))[:12]
        pages_k, pages_v = (
            torch.full((15, 16, 2, 32), torch.nan),
            torch.full((15, 16, 2, 32), torch.nan),
        )
        place = table[positions.long() // 16], positions.long() % 16
        pages_k[place], pages_v[place] = k, v
        rows = Rows(table.int()[None].contiguous(), zero, positions, where.seq_len, indices, counts)
        for impl in IMPLS:
            mixed, _ = page4.attend(q, PagedKV(pages_k, pages_v), rows, impl=impl)
            out = layer.o_proj((mixed * both[..., 32:].sigmoid()).reshape(length, -1))
            assert error(out, expected.double()) <= 1e-6
    assert int((counts >= 32).sum()) > length // 2


def test_bad_arguments_are_named_before_memory_is_touched() -> None:
    """Types, shapes, strides, page sizes and scales that do not fit are refused by name."""
    q, kv, rows = case(Mix(4))
    bad = replace
    cases: list[tuple[type[Exception], str, tuple[torch.Tensor, PagedKV, Rows]]] = [
        (BadDtype, "q", (q.double(), kv, rows)),
        (BadShape, "q", (q[:3], kv, rows)),
        (BadShape, "q", (q[:, :5], kv, rows)),
        (BadShape, "q", (q[..., :16], kv, rows)),
        (BadDtype, "k", (q, bad(kv, k=kv.k.double()), rows)),
        (BadShape, "v", (q, bad(kv, v=kv.v[1:]), rows)),
        (BadLayout, "k", (q, bad(kv, k=kv.k.transpose(2, 3).contiguous().transpose(2, 3)), rows)),
        (BadMetadata, "page", (q, PagedKV(kv.k[:, :6], kv.v[:, :6]), rows)),
        (BadScale, "k_scale", (q, bad(kv, k_scale=float("nan")), rows)),
        (BadScale, "v_scale", (q, bad(kv, v_scale=-1.0), rows)),
        (BadDtype, "indices", (q, kv, changed(rows, indices=rows.indices.long()))),
        (BadLayout, "indices", (q, kv, changed(rows, indices=rows.indices.t().contiguous().t()))),
        (BadShape, "counts", (q, kv, changed(rows, counts=rows.counts[:3]))),
        (BadShape, "seq_len", (q, kv, changed(rows, seq_len=rows.seq_len.repeat(2)))),
    ]
    for kind, argument, call in cases:
        with pytest.raises(kind) as caught:
            page4.attend(*call)
        assert caught.value.argument == argument
