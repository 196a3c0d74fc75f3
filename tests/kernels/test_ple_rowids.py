from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracle
from stallwatch_kernels.errors import BadDtype, BadIndex, BadLayout, BadMetadata, BadShape
from stallwatch_kernels.ple.layout import NgramNumbers, ngram_layout
from stallwatch_kernels.ple.rowids import RowIds, reference
from stallwatch_kernels.pool import RowPool

EOS = oracle.EOS
NUMBERS = NgramNumbers.from_config(oracle.tiny_config().to_dict())
LAYOUTS = [ngram_layout(NUMBERS, ordinal) for ordinal in (0, 1)]

GOLDEN = """
889 1391 2881 3235 5018 6073 6766 8024
484 1417 2241 3608 4503 5964 6617 7985
196 1888 2141 3287 4720 5224 6770 7483
753 1107 2032 3365 4596 5546 6835 7750
841 1698 2512 3448 5017 5467 7010 7171
244 1297 3024 3644 4592 5777 6594 7700
"""


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def fresh(requests: int = 1) -> torch.Tensor:
    return torch.full((requests, 2), EOS, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_golden_rows(dtype: torch.dtype) -> None:
    """Six tokens round an end token hash to the known rows, in both implementations."""
    ids = torch.tensor([10, 20, EOS, 30, 40, 50], dtype=dtype)
    expected = torch.tensor([int(word) for word in GOLDEN.split()]).view(6, 8)

    assert torch.equal(RowIds(LAYOUTS[0])(ids, ints(0, 6), fresh()), expected)
    assert torch.equal(reference(LAYOUTS[0], ids, ints(0, 6), fresh())[0], expected)


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Requests of 0 to 6 tokens with end tokens, placeholders and huge ids, and padding behind."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=0, max_size=5))
    total = sum(lengths) + draw(st.integers(0, 3))
    token = st.one_of(st.sampled_from([EOS, EOS, 0, 1, -1, 271]), st.integers(-(2**31), 2**31 - 1))
    ids = draw(st.lists(token, min_size=total, max_size=total))
    context = draw(st.lists(token, min_size=2 * len(lengths), max_size=2 * len(lengths)))
    starts = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    return ints(*ids), ints(*starts), ints(*context).view(-1, 2)


@given(batches())
def test_packed_batches_equal_the_reference(
    batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Any batch, negative ids and wrapping products included, gives the reference's rows and contexts."""
    fast = RowIds(LAYOUTS[1])
    rows, context = reference(LAYOUTS[1], *batch)

    assert torch.equal(fast(*batch), rows)
    assert torch.equal(fast.next_context(*batch), context)
    layout = LAYOUTS[1]
    limits = torch.tensor(layout.offsets) + torch.tensor(layout.primes)
    assert (rows >= torch.tensor(layout.offsets)).all()
    assert (rows < limits).all()


@pytest.mark.parametrize("ordinal", [0, 1])
@pytest.mark.parametrize("chunks", [(60,), (1, 1, 7, 20, 31), (1,) * 60, (2, 3, 5, 50)])
def test_rows_equal_transformers_over_any_chunks(ordinal: int, chunks: tuple[int, ...]) -> None:
    """Chunk borders, end tokens at them included, do not show: the oracle hashes all 60 tokens at once."""
    generator = torch.Generator().manual_seed(ordinal)
    alphabet = torch.tensor([5, 9, EOS, 77, 200])
    ids = alphabet[torch.randint(0, 5, (60,), generator=generator)]
    embedding = oracle.tiny_model().model.layers[2 * ordinal].ple.ple_embedding
    with oracle.recorded(embedding.ngram_embedding) as calls, torch.inference_mode():
        embedding(ids[None], None)
    hasher, context, found = RowIds(LAYOUTS[ordinal]), fresh(), []

    for chunk in torch.split(ids, list(chunks)):
        found.append(hasher(chunk, ints(0, len(chunk)), context))
        hasher.next_context(chunk, ints(0, len(chunk)), context, out=context)

    assert torch.equal(torch.cat(found), calls[0].args[0][0])


def test_padding_hashes_as_end_tokens() -> None:
    """Rows past the last request look as an end token at the start of a sequence, whatever id lies there."""
    hasher = RowIds(LAYOUTS[0])
    alone = hasher(ints(EOS), ints(0, 1), fresh())

    rows = hasher(ints(3, 4, 123, -7), ints(0, 2), fresh())

    assert torch.equal(rows[2:], alone.expand(2, -1))


def test_a_request_without_tokens_keeps_its_context() -> None:
    """Context moves by the tokens of this step, in place too, and by none where there are none."""
    context = ints(1, 2, 3, 4, 5, 6).view(3, 2)

    RowIds(LAYOUTS[0]).next_context(ints(7, 8, 9, 10), ints(0, 0, 1, 4), context, out=context)

    assert context.tolist() == [[1, 2], [4, 7], [9, 10]]


def test_threads_do_not_change_rows() -> None:
    """Tokens cut over threads in the middle of requests hash as in one thread."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 272, (2000,), generator=generator)
    batch = (ids, ints(0, 3, 900, 901, 2000), fresh(4))
    pool = RowPool(3)
    try:
        assert torch.equal(RowIds(LAYOUTS[0], pool)(*batch), RowIds(LAYOUTS[0])(*batch))
    finally:
        pool.close()


BAD = {
    "float ids": (BadDtype, {"ids": torch.zeros(4)}),
    "strided ids": (BadLayout, {"ids": torch.zeros(8, dtype=torch.int32)[::2]}),
    "two-dimensional ids": (BadShape, {"ids": torch.zeros(2, 2, dtype=torch.int32)}),
    "offsets past the ids": (BadMetadata, {"query_start_loc": ints(0, 2, 5)}),
    "falling offsets": (BadMetadata, {"query_start_loc": ints(0, 3, 2)}),
    "offsets not from 0": (BadMetadata, {"query_start_loc": ints(1, 2, 4)}),
    "no offsets": (BadShape, {"query_start_loc": ints()}),
    "context of another length": (BadShape, {"context": fresh(3)}),
    "context of another type": (BadDtype, {"context": fresh(2).long()}),
    "rows of another shape": (BadShape, {"out": torch.zeros(4, 7, dtype=torch.int64)}),
    "rows of another type": (BadDtype, {"out": torch.zeros(4, 8, dtype=torch.int32)}),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_by_name(name: str) -> None:
    """Each contradiction raises its own error, naming the argument."""
    error, change = BAD[name]
    given = {"ids": ints(1, 2, 3, 4), "query_start_loc": ints(0, 2, 4), "context": fresh(2)}

    with pytest.raises(error) as refusal:
        RowIds(LAYOUTS[0])(**{**given, **change})

    assert refusal.value.argument == next(iter(change))


def test_an_id_beyond_int32_enters_no_context() -> None:
    """A context holds int32; a larger id is refused rather than cut."""
    ids, context = torch.tensor([1, 2**31]), fresh()

    with pytest.raises(BadIndex, match=r"ids\[1\]"):
        RowIds(LAYOUTS[0]).next_context(ids, ints(0, 2), context, out=context)

    assert torch.equal(context, fresh())
