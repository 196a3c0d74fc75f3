from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

import oracle
from stallwatch_kernels.errors import BadMetadata
from stallwatch_kernels.ple.layout import NgramNumbers, is_prime, ngram_layout, verify

TINY = NgramNumbers.from_config(oracle.tiny_config().to_dict())
RELEASED = NgramNumbers(
    vocab_size=248_320,
    embed_dim=2560,
    ngram_size=3,
    heads_per_ngram=8,
    vocab_base=20_000_000,
    eos=248_044,
    parts=128,
)


def test_multipliers_are_the_published_ones() -> None:
    """Three configurations hash with known constants."""
    assert ngram_layout(RELEASED, 0).multipliers == (
        23703573157769,
        20109073645365,
        8052911324071,
    )
    assert ngram_layout(TINY, 0).multipliers == (
        2175817888646129,
        31215934654987533,
        4449929463106639,
    )
    assert ngram_layout(TINY, 1).multipliers == (
        15118404665304669,
        32290542737398475,
        7673143021455425,
    )


def test_primes_never_repeat_across_layers() -> None:
    """The second layer goes on where the first one's primes end."""
    first, second = ngram_layout(TINY, 0), ngram_layout(TINY, 1)

    assert first.primes == (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049)
    assert second.primes == (1051, 1061, 1063, 1069, 1087, 1091, 1093, 1097)
    assert first.offsets == (0, 1009, 2022, 3041, 4062, 5093, 6126, 7165)
    assert second.offsets[0] == 0


def test_the_released_table_has_the_published_size() -> None:
    """320,001,536 rows in 128 equal parts, which is 95.368 GiB of bfloat16."""
    layout = ngram_layout(RELEASED, 0)

    assert layout.primes[0] == 20_000_003
    assert layout.primes[-1] == 20_000_171
    assert layout.rows == 320_001_446
    assert layout.padded_rows == 320_001_536
    assert layout.shard_rows() == (2_500_012,) * 128
    assert round(layout.padded_rows * RELEASED.head_dim * 2 / 2**30, 3) == 95.368


@given(rows=st.integers(2, 5000), parts=st.integers(1, 600))
def test_parts_hold_every_row_once(rows: int, parts: int) -> None:
    """However a table is cut, the parts add up to it and only the last ones are short."""
    numbers = dataclasses.replace(TINY, vocab_base=rows, parts=parts)
    layout = ngram_layout(numbers, 0)
    shards = layout.shard_rows()

    assert len(shards) == parts
    assert sum(shards) == layout.padded_rows
    assert sorted(shards, reverse=True) == list(shards)


@given(st.integers(0, 200_000))
def test_primality_agrees_with_trial_division(number: int) -> None:
    """Below 200,000 every verdict is checked by division."""
    assert is_prime(number) == (
        number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))
    )


def test_primality_of_numbers_that_fool_weak_tests() -> None:
    """Strong pseudoprimes to small bases are composite, the largest 64-bit prime is prime."""
    assert not is_prime(3_215_031_751)  # to bases 2, 3, 5, 7
    assert not is_prime(3_825_123_056_546_413_051)  # to the first nine primes
    assert is_prime(18_446_744_073_709_551_557)


@pytest.mark.parametrize("ordinal", [0, 1])
def test_stored_buffers_of_the_oracle_are_accepted(ordinal: int) -> None:
    """transformers' buffers equal the recomputation."""
    embedding = oracle.tiny_model().model.layers[2 * ordinal].ple.ple_embedding

    verify(
        ngram_layout(TINY, ordinal),
        embedding.layer_multipliers.tolist(),
        embedding.ngram_heads_vocab_sizes.tolist(),
        embedding.ngram_heads_offsets.tolist(),
    )


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (0, "layer_multipliers"),
        (1, "ngram_heads_vocab_sizes"),
        (2, "ngram_heads_offsets"),
    ],
)
def test_a_differing_buffer_is_named(changed: int, named: str) -> None:
    """The refusal says which buffer and which place."""
    layout = ngram_layout(TINY, 1)
    stored = [list(layout.multipliers), list(layout.primes), list(layout.offsets)]
    stored[changed][1] += 2

    with pytest.raises(BadMetadata, match=f"{named} of PLE layer 1 holds .* at 1") as refusal:
        verify(layout, *stored)

    assert refusal.value.argument == named


def test_a_short_buffer_is_named() -> None:
    """A checkpoint of another n-gram size is refused by its lengths."""
    layout = ngram_layout(TINY, 0)

    with pytest.raises(BadMetadata, match="has 2 entries; expected 3"):
        verify(layout, layout.multipliers[:2], layout.primes, layout.offsets)


@pytest.mark.parametrize(
    "change",
    [{"embed_dim": 63}, {"ngram_size": 1}, {"vocab_size": 0}, {"heads_per_ngram": 0}, {"parts": 0}],
)
def test_impossible_numbers_are_refused(change: dict[str, int]) -> None:
    """A configuration that cannot be laid out names its field."""
    with pytest.raises(BadMetadata, match=next(iter(change))):
        dataclasses.replace(TINY, **change)


def test_of_several_end_tokens_the_first_counts() -> None:
    """A list of end tokens hashes as its first element."""
    config = {**oracle.tiny_config().to_dict(), "eos_token_id": [257, 256]}

    assert NgramNumbers.from_config(config).eos == 257
