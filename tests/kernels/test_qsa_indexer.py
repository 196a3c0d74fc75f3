"""Indexer and selection: against transformers, against a plain sort, and in every order of arrival."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracle
from stallwatch_kernels.errors import BadDtype, BadLayout, BadMetadata, BadShape
from stallwatch_kernels.pool import RowPool
from stallwatch_kernels.qsa import indexer, select
from stallwatch_kernels.qsa.indexer import KeyCache, Norm, Where
from stallwatch_kernels.qsa.rotary import Rotary, rms_norm, rotate

BUDGET = 32
PROMPT = 185


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def where_of(length: int, request: int = 0, requests: int = 1) -> Where:
    return Where(
        torch.full((length,), request, dtype=torch.int32),
        torch.arange(length, dtype=torch.int32),
        torch.full((requests,), length, dtype=torch.int32),
    )


def cache_of(
    length: int, d: int = 16, page: int = 8, dtype: torch.dtype = torch.float32
) -> KeyCache:
    """Shuffled pages for one request."""
    pages = length // 4 // page + 1
    table = torch.randperm(pages + 2, generator=torch.Generator().manual_seed(5))[:pages]
    return KeyCache(torch.zeros(pages + 2, page, d, dtype=dtype), table.int()[None].contiguous())


class Layer:
    """One QSA layer of the tiny model as it ran on a prompt, and the same queries and keys in our hands."""

    def __init__(self, *, stable: bool) -> None:
        model = oracle.tiny_model()
        self.attention = model.model.layers[1].self_attn
        self.indexer: Any = self.attention.indexer
        ids = torch.randint(0, 256, (1, PROMPT), generator=torch.Generator().manual_seed(3))
        with torch.inference_mode(), oracle.recorded(self.indexer) as calls:
            if stable:
                with oracle.stable_ties():
                    model(input_ids=ids)
            else:
                model(input_ids=ids)
        call = calls[0]
        self.hidden = call.args[0] if call.args else call.kwargs["hidden_states"]
        self.mask = call.output[0, 0]
        settings = model.config.get_text_config()
        rope = settings.rope_parameters
        rotated = int(settings.head_dim * rope["partial_rotary_factor"])
        rotary = Rotary(rotated, rope["rope_theta"], 4 * PROMPT)
        self.norm = Norm(self.indexer.k_layernorm.weight, rotary)
        with torch.inference_mode():
            q, raw = self.indexer.index_qk_proj(self.hidden[0]).split([64, 16], -1)
            positions = torch.arange(PROMPT)
            normed = rms_norm(q.reshape(PROMPT, 4, 16), self.indexer.q_layernorm.weight)
            self.q = rotate(normed, *rotary.at(positions, q.dtype)).clone()
            self.raw = raw.contiguous().clone()

    def selected(self, indices: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(PROMPT, PROMPT + 1, dtype=torch.bool)
        mask.scatter_(1, torch.where(indices >= 0, indices, PROMPT).long(), value=True)
        return mask[:, :PROMPT]

    def cache(self, steps: list[int]) -> KeyCache:
        """Compressed keys after the prompt arrived in steps of these sizes."""
        cache, ring = cache_of(PROMPT), torch.zeros(1, 4, 16)
        done = 0
        for size in steps:
            where = Where(
                torch.zeros(size, dtype=torch.int32),
                torch.arange(done, done + size, dtype=torch.int32),
                ints(done + size),
            )
            indexer.extend(self.raw[done : done + size], ring, cache, where, norm=self.norm)
            done += size
        assert done == PROMPT
        return cache


@pytest.mark.slow
def test_selection_is_that_of_transformers_when_its_ties_are_stable() -> None:
    """Every row selects the very tokens of transformers' indexer, on a prompt where most rows drop blocks."""
    layer = Layer(stable=True)
    indices, counts = select.select(layer.q, layer.cache([PROMPT]), where_of(PROMPT), budget=BUDGET)

    dropped = sum((t + 1) // 4 > BUDGET // 4 for t in range(PROMPT))

    assert torch.equal(layer.selected(indices), layer.mask)
    assert torch.equal(counts, layer.mask.sum(-1).int())
    assert dropped > PROMPT // 2


@pytest.mark.slow
def test_the_unpatched_model_agrees_above_the_cut_and_differs_only_among_ties() -> None:
    """Against transformers as it is: blocks scoring above the cut are equal, and a row may differ only where
    several blocks tie at the cut."""
    layer = Layer(stable=False)
    cache = layer.cache([PROMPT])
    scores = indexer.score(layer.q, cache, where_of(PROMPT))
    indices, _ = select.select(layer.q, cache, where_of(PROMPT), budget=BUDGET)
    ours, theirs = layer.selected(indices), layer.mask
    ties = 0
    for t in range(BUDGET + 3, PROMPT):
        visible = (t + 1) // 4
        mine = scores[t, :visible]
        edge = mine.sort(descending=True).values[BUDGET // 4 - 1]
        above = (mine > edge + 1e-6).repeat_interleave(4)
        tied = int((mine - edge).abs().le(1e-6).sum()) > 1
        ties += tied
        assert bool(theirs[t, : 4 * visible][above].all())
        assert bool(ours[t, : 4 * visible][above].all())
        assert tied or torch.equal(ours[t], theirs[t])
    assert ties < PROMPT // 2  # otherwise this test says nothing


@pytest.mark.slow
def test_scores_are_relu_sums_in_float64() -> None:
    """Scores equal sum over heads of relu(q . k) / sqrt(d) in float64, and -inf past the visible blocks."""
    layer = Layer(stable=True)
    cache = layer.cache([PROMPT])
    scores = indexer.score(layer.q, cache, where_of(PROMPT))
    keys = cache.keys[cache.page_table[0].long()].flatten(0, 1)[: PROMPT // 4].double()
    expected = torch.einsum("thd,bd->thb", layer.q.double(), keys).relu().sum(1) / 4.0
    visible = torch.arange(PROMPT // 4) < ((torch.arange(PROMPT) + 1) // 4)[:, None]
    difference = (scores.double() - expected)[visible]

    assert difference.norm() <= 1e-6 * expected[visible].norm()
    assert bool(scores[~visible].eq(-torch.inf).all())


@pytest.mark.slow
@pytest.mark.parametrize("steps", [[PROMPT], [1] * PROMPT, [3, 1, 60, 2, 119], [7] * 26 + [3]])
def test_compressed_keys_do_not_depend_on_how_the_prompt_arrived(steps: list[int]) -> None:
    """Any chunking leaves bit-identical compressed keys."""
    layer = Layer(stable=True)

    assert torch.equal(layer.cache(steps).keys, layer.cache([100, 85]).keys)


def test_a_longer_ring_survives_a_rollback() -> None:
    """After rejected tokens are rewritten, the group holds the new keys."""
    norm = Norm(torch.zeros(16), Rotary(8, 1e4, 64))
    raw = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    cache, ring = cache_of(16), torch.zeros(1, 8, 16)
    wrong = raw.clone()
    wrong[3:6] += 1
    indexer.extend(wrong[:6], ring, cache, where_of(6), norm=norm)
    again = Where(ints(0, 0, 0, 0, 0), ints(3, 4, 5, 6, 7), ints(8))
    indexer.extend(raw[3:], ring, cache, again, norm=norm)
    straight = cache_of(16)
    indexer.extend(raw, torch.zeros(1, 8, 16), straight, where_of(8), norm=norm)

    assert torch.equal(cache.keys, straight.keys)


@given(
    st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 3e-39, 7e8]), min_size=1, max_size=80),
    st.integers(1, 12),
    st.integers(0, 3),
)
def test_the_best_blocks_are_those_of_a_stable_sort(
    scores: list[float], blocks: int, tail: int
) -> None:
    """For any scores, ties included: score descending, block ascending, then the tail."""
    order = sorted(range(len(scores)), key=lambda block: (-scores[block], block))[:blocks]
    expected = [4 * block + t for block in sorted(order) for t in range(4)]
    limit = 4 * len(scores) + tail

    got = select.take_blocks(torch.tensor(scores), 4 * blocks, limit)

    assert got == expected + list(range(4 * len(scores), limit))


def test_random_scores_select_like_topk() -> None:
    """Without ties the set is torch.topk's, far above the size where counting passes matter."""
    scores = torch.rand(20_000, generator=torch.Generator().manual_seed(2)).unique()
    scores = scores[torch.randperm(len(scores), generator=torch.Generator().manual_seed(3))]
    got = select.take_blocks(scores, 2048, 4 * len(scores))

    assert {t // 4 for t in got} == set(scores.topk(512).indices.tolist())


@pytest.mark.parametrize("length", range(9))
def test_rows_shorter_than_the_budget_read_all_they_may(length: int) -> None:
    """Up to the budget a row reads every token of its past, whatever the tail."""
    q = torch.randn(1, 4, 16)
    where = Where(ints(0), ints(length - 1), ints(length))
    indices, counts = select.select(q, cache_of(16), where, budget=8)

    assert indices[0].tolist() == list(range(length)) + [-1] * (11 - length)
    assert counts.tolist() == [length]


def test_stale_and_unknown_rows_select_what_lives() -> None:
    """A position past the live length is capped by it; a request that does not exist selects nothing."""
    q = torch.randn(4, 4, 16)
    where = Where(ints(0, 0, -1, 7), ints(40, 2, 5, 5), ints(6))
    indices, counts = select.select(q, cache_of(64), where, budget=8)

    assert counts.tolist() == [6, 3, 0, 0]
    assert indices[0, :6].tolist() == [0, 1, 2, 3, 4, 5]
    assert bool((indices[2:] == -1).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_rows_selection_does_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    """Scores are bitwise equal at M = 1, 2, 3, 4, 8, and over two threads."""
    generator = torch.Generator().manual_seed(4)
    cache = cache_of(400, d=32, dtype=dtype)
    cache.keys.copy_(torch.randn(cache.keys.shape, generator=generator))
    q = torch.randn(8, 3, 32, generator=generator)
    position = torch.arange(392, 400, dtype=torch.int32)
    zero = torch.zeros(8, dtype=torch.int32)
    whole = indexer.score(q, cache, Where(zero, position, ints(400)))
    pool = RowPool(2)
    try:
        threaded = indexer.score(q, cache, Where(zero, position, ints(400)), pool=pool)
    finally:
        pool.close()

    assert torch.equal(whole, threaded)
    for many in (1, 2, 3, 4):
        part = Where(zero[:many], position[:many], ints(400))
        assert torch.equal(indexer.score(q[:many], cache, part), whole[:many])


def test_the_norm_of_a_row_does_not_depend_on_the_batch() -> None:
    """rms_norm of one row has the bits it has among many, and equals the formula."""
    x = torch.randn(9, 48, generator=torch.Generator().manual_seed(6))
    weight = torch.randn(48, generator=torch.Generator().manual_seed(7))
    whole = rms_norm(x, weight)
    wide = x.double()
    expected = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + weight.double())

    assert all(torch.equal(rms_norm(x[i : i + 1], weight)[0], whole[i]) for i in range(9))
    assert (whole - expected).norm() <= 2e-7 * expected.norm()


def test_bad_arguments_are_named() -> None:
    """Each refusal is an error of its own that names the argument."""
    cache, where = cache_of(16), where_of(4)
    q = torch.randn(4, 4, 16)
    norm = Norm(torch.zeros(16), Rotary(8, 1e4, 64))
    with pytest.raises(BadDtype, match="q is"):
        indexer.score(q.double(), cache, where)
    with pytest.raises(BadShape, match="head"):
        indexer.score(torch.randn(4, 4, 32), cache, where)
    with pytest.raises(BadDtype, match="row_pos"):
        indexer.score(q, cache, Where(where.row_req, where.row_pos.long(), where.seq_len))
    with pytest.raises(BadShape, match="row_req"):
        indexer.score(q[:3], cache, where)
    with pytest.raises(BadLayout, match="keys"):
        indexer.score(
            q, KeyCache(cache.keys[..., ::2].repeat(1, 1, 2)[..., ::2], cache.page_table), where
        )
    with pytest.raises(BadMetadata, match="budget"):
        select.select(q, cache, where, budget=6)
    with pytest.raises(BadShape, match="ring"):
        indexer.extend(torch.zeros(4, 16), torch.zeros(1, 3, 16), cache, where, norm=norm)
    with pytest.raises(BadDtype, match="ring"):
        indexer.extend(torch.zeros(4, 16), torch.zeros(1, 4, 16).half(), cache, where, norm=norm)
