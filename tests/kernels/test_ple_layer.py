"""A whole PLE layer of these kernels beside transformers' layer on the tiny checkpoint."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracle
from stallwatch_kernels import jit, warmup
from stallwatch_kernels.gdn.batch import Carried
from stallwatch_kernels.ple.conv import Conv
from stallwatch_kernels.ple.gate import Gate, GateWeights
from stallwatch_kernels.ple.gather import Gather, GatherSpec
from stallwatch_kernels.ple.layout import NgramNumbers, ngram_layout
from stallwatch_kernels.ple.rowids import RowIds, RowIdSpec
from stallwatch_kernels.ple.table import Format, Shard, Table

NUMBERS = NgramNumbers.from_config(oracle.tiny_config().to_dict())
STREAMS, HIDDEN = 4, 64


class Layer:
    """One PLE layer out of the kernels and the oracle's weights; the state of `slots` requests."""

    def __init__(self, ordinal, slots):
        theirs = oracle.tiny_model().model.layers[2 * ordinal].ple
        self.theirs = theirs
        layout = ngram_layout(NUMBERS, ordinal)
        weight = theirs.ple_embedding.ngram_embedding.weight.detach()
        shards = [Shard(part.contiguous()) for part in weight.split(layout.shard_rows()[0])]
        self.row_ids = RowIds(layout)
        self.gather = Gather(Table(Format.FP32, NUMBERS.head_dim, shards), torch.float32)
        self.gate = Gate(
            GateWeights(
                theirs.norm_key.weight.detach(),
                theirs.norm_query.weight.detach(),
                theirs.norm_conv.weight.detach(),
                STREAMS,
                theirs.norm_key.eps,
            )
        )
        self.conv = Conv(theirs.conv1d.weight, theirs.conv1d.dilation[0])
        self.context = torch.full((slots, 2), oracle.EOS, dtype=torch.int32)
        self.state = self.conv.new_state(slots)

    def step(self, ids, hidden, starts, slots):
        """One packed step of the requests in `slots`."""
        context = self.context[slots.long()].contiguous()
        embedded = self.gather(self.row_ids(ids, starts, context))
        self.context[slots.long()] = self.row_ids.next_context(ids, starts, context)
        with torch.inference_mode():  # the projections belong to nobody's kernel here
            # row by row: a matrix product of torch may round a row differently in another batch
            keys = torch.cat([self.theirs.key_proj(row[None]) for row in embedded])
            values = torch.cat([self.theirs.value_proj(row[None]) for row in embedded])
        u, c = self.gate(keys, values, hidden, tokens=int(starts[-1]))
        return self.conv(u, c, Carried(self.state, slots, starts))


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def prompt(tokens, seed):
    """Ids with an end token in every eleven or so, and a residual."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, oracle.VOCAB, (tokens,), generator=generator)
    ids[torch.rand(tokens, generator=generator) < 0.09] = oracle.EOS
    return ids, torch.randn(tokens, STREAMS * HIDDEN, generator=generator) * 2


def theirs(ordinal, ids, hidden):
    with torch.inference_mode():
        layer = oracle.tiny_model().model.layers[2 * ordinal].ple
        return layer(hidden[None], ids[None], None)[0]


def distance(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.slow
@pytest.mark.parametrize("ordinal", [0, 1])
@pytest.mark.parametrize("tokens", [1, 2, 9, 10, 600])
def test_a_prompt_equals_transformers(ordinal, tokens):
    """Prompts shorter and far longer than the state, relative L2 at most 1e-6."""
    ids, hidden = prompt(tokens, seed=tokens)

    out = Layer(ordinal, 1).step(ids, hidden, ints(0, tokens), ints(0))

    assert distance(out, theirs(ordinal, ids, hidden)) <= 1e-6


@pytest.mark.slow
def test_the_layer_in_a_running_model_equals_transformers():
    """The inputs that the oracle's own forward pass gives its two PLE layers yield its outputs."""
    ids, _ = prompt(184, seed=5)
    model = oracle.tiny_model()
    layers = [model.model.layers[index].ple for index in (0, 2)]
    with (
        torch.inference_mode(),
        oracle.recorded(layers[0]) as first,
        oracle.recorded(layers[1]) as second,
    ):
        model(ids[None], use_cache=False)

    for ordinal, (call,) in enumerate((first, second)):
        hidden = (call.args + tuple(call.kwargs.values()))[0]
        out = Layer(ordinal, 1).step(ids, hidden[0], ints(0, len(ids)), ints(0))
        assert distance(out, call.output[0]) <= 1e-6


@pytest.mark.slow
@given(data=st.data())
def test_packed_chunks_give_the_bits_of_whole_prompts(data):
    """Three prompts, advanced by any chunks in any company and any slots, equal each alone in one piece."""
    prompts = [prompt(tokens, seed=tokens) for tokens in (23, 2, 14)]
    slots = data.draw(st.permutations(range(3)))
    packed = Layer(0, 3)
    done, parts = [0, 0, 0], [[], [], []]

    while any(at < len(ids) for at, (ids, _) in zip(done, prompts, strict=True)):
        left = [len(ids) - at for at, (ids, _) in zip(done, prompts, strict=True)]
        chosen = data.draw(st.permutations([n for n in range(3) if left[n]]))
        sizes = [data.draw(st.integers(1, left[n])) for n in chosen]
        starts = ints(*(sum(sizes[:n]) for n in range(len(sizes) + 1)))
        spans = [(n, slice(done[n], done[n] + size)) for n, size in zip(chosen, sizes, strict=True)]
        ids, hidden = (
            torch.cat([prompts[n][which][span] for n, span in spans]) for which in (0, 1)
        )
        out = packed.step(ids, hidden, starts, ints(*(slots[n] for n in chosen)))
        for (n, span), rows in zip(spans, out.split(sizes), strict=True):
            parts[n].append(rows)
            done[n] = span.stop

    for n, (ids, hidden) in enumerate(prompts):
        alone = Layer(0, 1)
        assert torch.equal(torch.cat(parts[n]), alone.step(ids, hidden, ints(0, len(ids)), ints(0)))
        assert torch.equal(packed.state[slots[n]], alone.state[0])


def test_warm_up_leaves_no_id_or_row_to_compile():
    """After the tasks, hashing and gathering other formats and types compile nothing."""
    layout = ngram_layout(NUMBERS, 0)
    specs = [RowIdSpec(layout, dtype) for dtype in (torch.int32, torch.int64)]
    warmup.run(warmup.tasks([*specs, GatherSpec(Format.FP32, torch.float32)], warmup.Shapes()))
    before = jit.signatures()

    codes = torch.zeros(layout.padded_rows, NUMBERS.head_dim, dtype=torch.int8)
    table = Table(Format.INT8, NUMBERS.head_dim, [Shard(codes, torch.ones(len(codes), 1))])
    for dtype in (torch.int32, torch.int64):
        rows = RowIds(layout)(torch.arange(5, dtype=dtype), ints(0, 5), ints(1, 2).view(1, 2))
        Gather(table, torch.bfloat16)(rows)

    assert warmup.grown(before, jit.signatures()) == {}


def test_the_torch_paths_can_be_chosen(monkeypatch):
    """The operator's overrides hash and gather by the references, to the same bits."""
    layout = ngram_layout(NUMBERS, 1)
    ids, starts, context = torch.arange(9), ints(0, 4, 8), ints(1, 2, 3, 4).view(2, 2)
    codes = torch.randn(layout.padded_rows, NUMBERS.head_dim)
    table = Table(Format.FP32, NUMBERS.head_dim, [Shard(codes)])
    rows = RowIds(layout)(ids, starts, context)
    expected = Gather(table, torch.float16)(rows)
    monkeypatch.setenv("STALLWATCH_KERNEL_PLE_ROWIDS", "torch")
    monkeypatch.setenv("STALLWATCH_KERNEL_PLE_GATHER", "torch")

    hasher, gather = RowIds(layout), Gather(table, torch.float16)

    assert (hasher.choice.impl, gather.choice.impl) == ("torch", "torch")
    assert torch.equal(hasher(ids, starts, context), rows)
    assert torch.equal(gather(rows), expected)
