"""Tokens follow from (logits, parameters, seed, count) alone, and have the distribution asked for."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from stallwatch_engine.sampling.batch import SampleBatch
from stallwatch_engine.sampling.draw import uniform
from stallwatch_engine.sampling.params import GREEDY, BadSampling, SamplingParams
from stallwatch_engine.sampling.sampler import results, sample

torch.set_num_threads(1)
NAN, INF = math.nan, math.inf


def logits_of(rows: int, vocab: int = 271, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def ids(logits, params, counts) -> list[int]:
    batch = SampleBatch.of([(params, count) for count in counts])
    return sample(logits, batch).ids.tolist()


def frequencies(row: torch.Tensor, params: SamplingParams, draws: int = 20_000) -> torch.Tensor:
    """How often each token comes from one row of logits, over `draws` counts."""
    found = ids(row.expand(draws, -1), params, range(draws))
    return torch.bincount(torch.tensor(found), minlength=row.numel()) / draws


def wanted(row: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution of transformers' warpers."""
    scores = TemperatureLogitsWarper(params.temperature)(None, row[None])
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    return scores.softmax(-1)[0]


def test_greedy_takes_the_first_of_equals():
    """The highest logit wins, the lowest id among equal ones, whatever the seed."""
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    assert ids(logits, SamplingParams(seed=9), [0, 5]) == [1, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5, seed=3),
        SamplingParams(temperature=1.7, top_k=4),
        SamplingParams(temperature=1.0, top_p=0.8, seed=-1),
        SamplingParams(temperature=1.2, top_k=7, top_p=0.6),
        SamplingParams(temperature=2.0, top_p=0.01),
        SamplingParams(temperature=1.0, top_k=1),
    ],
)
def test_distribution_is_that_of_the_reference(params):
    """Over 20,000 draws each token comes as often as transformers' warpers say, and no other token at all."""
    row = torch.randn(12, generator=torch.Generator().manual_seed(4))
    expected = wanted(row, params)

    found = frequencies(row, params)

    assert not found[expected == 0].any()
    error = (expected * (1 - expected) / 20_000).sqrt()
    assert ((found - expected).abs() <= 5 * error + 1e-12).all()


@given(st.data())
def test_a_row_has_the_same_bits_in_any_batch(data):
    """Ids and log-probabilities of a row do not depend on which rows are beside it, or on how many."""
    rows = data.draw(st.integers(2, 9))
    vocab = data.draw(st.sampled_from([5, 17, 271, 272]))
    logits = logits_of(rows, vocab, seed=data.draw(st.integers(0, 99)))
    choices = [
        GREEDY,
        SamplingParams(temperature=0.7, seed=5, logprobs=3),
        SamplingParams(temperature=1.5, top_p=0.9, top_k=20, logprobs=0),
        SamplingParams(logprobs=5),
    ]
    samples = [
        (data.draw(st.sampled_from(choices)), data.draw(st.integers(0, 9))) for _ in range(rows)
    ]
    params = [each for each, _ in samples]
    together = results(sample(logits, SampleBatch.of(samples)).tensors(), params)

    for number in range(rows):
        alone = sample(logits[number : number + 1], SampleBatch.of(samples[number : number + 1]))
        (result,) = results(alone.tensors(), params[number : number + 1])
        assert result == together[number]


def test_seed_and_count_decide():
    """The same seed and count give the same token; another count or seed gives another sequence."""
    row = logits_of(1).expand(64, -1)
    hot = SamplingParams(temperature=2.0, seed=11)
    first = ids(row, hot, range(64))

    assert first == ids(row, hot, range(64))
    assert first[32:] == ids(row[:32], hot, range(32, 64))
    assert first != ids(row, SamplingParams(temperature=2.0, seed=12), range(64))
    assert len(set(first)) > 8


def test_uniform_numbers():
    """Numbers lie in [0, 1), are spread evenly, and neighbouring seeds and counts are unrelated."""
    numbers = [[uniform(seed, count) for count in range(128)] for seed in range(128)]
    table = torch.tensor(numbers, dtype=torch.float64)

    assert table.min() >= 0
    assert table.max() < 1
    assert len(table.unique()) == table.numel()
    gamma = 0x9E3779B97F4A7C15  # the step of the generator: no stream is another one shifted
    assert uniform(5 + gamma, 3) != uniform(5, 4)
    cells = torch.histc(table.flatten(), bins=16, min=0, max=1)
    expected = table.numel() / 16
    assert ((cells - expected) ** 2 / expected).sum() < 45  # chi-squared, 15 degrees: 1e-4
    centred = table - 0.5
    for neighbour in (centred[1:] * centred[:-1], centred[:, 1:] * centred[:, :-1]):
        assert abs(neighbour.mean() * 12) < 0.035  # correlation, 4.5 standard errors


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0, logprobs=2)])
def test_a_bad_row_fails_alone(poison, params):
    """A NaN or an infinity anywhere in a row fails that row; the others keep their bits."""
    logits = logits_of(4)
    samples = [(params, 0)] * 4
    clean = sample(logits, SampleBatch.of(samples))
    logits[2, 100] = poison

    dirty = sample(logits, SampleBatch.of(samples))

    assert dirty.failed.tolist() == [False, False, True, False]
    assert not clean.failed.any()
    assert 0 <= dirty.ids[2] < 271  # legal: the next step may already have taken it
    others = [0, 1, 3]
    for name, tensor in dirty.tensors().items():
        if tensor.numel():
            assert torch.equal(tensor[others], clean.tensors()[name][others]), name
    found = results(dirty.tensors(), [params] * 4)
    assert (found[2].failed, found[2].logprob, found[2].top) == (True, None, ())
    assert found[3] == results(clean.tensors(), [params] * 4)[3]


def test_logprobs_are_the_models_own():
    """Log-probabilities are of the untempered distribution, the likeliest best first, as many as asked for."""
    logits = logits_of(3)
    expected = logits.double().log_softmax(-1)
    params = [
        SamplingParams(temperature=3.0, logprobs=4),
        GREEDY,
        SamplingParams(temperature=0.2, top_k=2, logprobs=0),
    ]
    found = results(
        sample(logits, SampleBatch.of([(each, 7) for each in params])).tensors(), params
    )

    assert [len(each.top) for each in found] == [4, 0, 0]
    assert found[1].logprob is None
    for number in (0, 2):
        token = found[number].token
        assert found[number].logprob == pytest.approx(expected[number, token].item(), abs=1e-5)
    best = expected[0].topk(4)
    assert [token for token, _ in found[0].top] == best.indices.tolist()
    assert [value for _, value in found[0].top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_more_alternatives_than_tokens():
    """Asking for more alternatives than the vocabulary has gives the vocabulary."""
    params = [SamplingParams(logprobs=20)]
    found = results(sample(logits_of(1, 5), SampleBatch.of([(params[0], 0)])).tensors(), params)
    assert len(found[0].top) == 5


@pytest.mark.parametrize("temperature", [1e-30, 1e-300, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature):
    """However small, a temperature neither overflows nor changes the winner."""
    logits = logits_of(8)
    cold = SamplingParams(temperature=temperature)
    assert ids(logits, cold, range(8)) == logits.argmax(-1).tolist()


def test_a_tiny_temperature_keeps_ties():
    """Equal highest logits are drawn equally often, however small the temperature."""
    row = torch.tensor([1.0, 7.0, 7.0, 6.9])
    found = frequencies(row, SamplingParams(temperature=1e-308), draws=2000)
    assert found[[0, 3]].tolist() == [0, 0]
    assert 0.45 < found[1] < 0.55


def test_bfloat16_logits():
    """Half-precision logits give the tokens of the same values in float32."""
    logits = logits_of(6).bfloat16()
    hot = SamplingParams(temperature=1.3, top_p=0.95)
    assert ids(logits, hot, range(6)) == ids(logits.float(), hot, range(6))


def test_rows_and_samples_must_agree():
    """Another number of rows is an error, not a broadcast."""
    with pytest.raises(ValueError, match="for 2 samples"):
        sample(logits_of(1), SampleBatch.of([(GREEDY, 0)] * 2))
    with pytest.raises(ValueError, match="for 2 samples"):
        results(sample(logits_of(1), SampleBatch.of([(GREEDY, 0)])).tensors(), [GREEDY] * 2)


def test_no_samples():
    """A step that samples nothing (a chunk of a prompt) yields empty results."""
    found = sample(logits_of(0), SampleBatch.of([]))
    assert results(found.tensors(), []) == ()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": NAN}, "temperature"),
        ({"temperature": INF}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": NAN}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"seed": 1 << 64}, "seed"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
    ],
)
def test_meaningless_parameters(change, named):
    """A parameter that means nothing is refused by its name."""
    with pytest.raises(BadSampling) as caught:
        SamplingParams(**change)
    assert caught.value.parameter == named
