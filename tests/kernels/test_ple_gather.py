"""Gathering from six formats: bits against the dequantised table, whatever holds the rows."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stallwatch_kernels.errors import (
    BadDtype,
    BadIndex,
    BadLayout,
    BadMetadata,
    BadScale,
    BadShape,
)
from stallwatch_kernels.ple.gather import Gather, reference
from stallwatch_kernels.ple.table import Format, Shard, Table, dequantise
from stallwatch_kernels.pool import RowPool
from stallwatch_kernels.tensors import e4m3_table

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = [
    ("fp32", 16, None),
    ("bf16", 16, None),
    ("fp8", 16, None),
    ("int8", 16, torch.float32),
    ("int8", 16, torch.float16),
    ("int8", 0, torch.float32),  # 0: one group a row
    ("int8", 0, torch.float16),
    ("int4", 16, torch.float16),
    ("nvfp4", 16, torch.float8_e4m3fn),
]
IDS = [f"{fmt}-{group or 'row'}-{str(scale).removeprefix('torch.')}" for fmt, group, scale in KINDS]
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def random_shard(kind, rows, dim, generator):
    """Every code is possible; scales span several powers of two, as do the factors."""
    fmt, group, scale_dtype = kind
    factor = float(torch.rand(1, generator=generator) * 3 + 0.1)
    if fmt in {"fp32", "bf16"}:
        values = torch.randn(rows, dim, generator=generator)
        return Shard(values if fmt == "fp32" else values.bfloat16())
    if fmt == "fp8":
        codes = torch.randint(0, 256, (rows, dim), generator=generator, dtype=torch.uint8)
        codes[(codes & 0x7F) == 0x7F] = 0x7E  # a NaN code has a test of its own
        return Shard(codes.view(torch.float8_e4m3fn), factor=factor)
    groups = -(-dim // (group or dim))
    scales = torch.exp2(torch.rand(rows, groups, generator=generator) * 8 - 6).to(scale_dtype)
    width, low, high = (dim, -128, 128) if fmt == "int8" else (dim // 2, 0, 256)
    codes = torch.randint(low, high, (rows, width), generator=generator)
    codes = codes.to(torch.int8 if fmt == "int8" else torch.uint8)
    return Shard(codes, scales, factor if fmt == "nvfp4" else 1.0)


def random_table(kind, rows, dim, seed=0):
    """A table cut into shards of `rows`."""
    generator = torch.Generator().manual_seed(seed)
    shards = [random_shard(kind, count, dim, generator) for count in rows]
    return Table(Format(kind[0]), dim, shards, group=kind[1] or dim), shards


def same_bits(left, right):
    return left.dtype == right.dtype and torch.equal(
        left.view(torch.uint8), right.view(torch.uint8)
    )


def as_maps(shards, folder):
    """The same shards as read-only memory maps of files."""

    def mapped(tensor, name):
        bits = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}.get(tensor.dtype)
        array = (tensor if bits is None else tensor.view(bits)).numpy()
        array.tofile(folder / name)
        return np.memmap(folder / name, dtype=array.dtype, mode="r", shape=array.shape)

    return [
        Shard(
            mapped(shard.codes, f"codes{n}"),
            None if shard.scales is None else mapped(shard.scales, f"scales{n}"),
            shard.factor,
        )
        for n, shard in enumerate(shards)
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS, ids=IDS)
def test_bits_equal_the_dequantised_table(kind, dtype, tmp_path):
    """RAM, memory maps, three shards: the bits of the whole table dequantised, cast and indexed."""
    for number, dim in enumerate((160, 8, 40)):
        table, shards = random_table(kind, (70, 70, 31), dim, seed=number)
        folder = tmp_path / str(dim)
        folder.mkdir()
        mapped = Table(Format(kind[0]), dim, as_maps(shards, folder), group=kind[1] or dim)
        rows = torch.randint(0, 171, (40, 3), generator=torch.Generator().manual_seed(number))
        expected = dequantise(table).to(dtype)[rows.flatten()].reshape(40, 3 * dim)

        assert same_bits(Gather(table, dtype)(rows), expected)
        assert same_bits(Gather(mapped, dtype)(rows), expected)
        assert same_bits(reference(mapped, rows, dtype), expected)


@pytest.mark.parametrize("kind", KINDS, ids=IDS)
def test_one_shard_equals_many(kind):
    """How a table is cut does not show in what is gathered (a factor belongs to a shard, so it is shared)."""
    dim = 160
    _, (whole,) = random_table(kind, (100,), dim)
    cuts = [slice(lo, lo + 30) for lo in range(0, 100, 30)]
    parts = [
        Shard(whole.codes[cut], None if whole.scales is None else whole.scales[cut], whole.factor)
        for cut in cuts
    ]
    fmt, group = Format(kind[0]), kind[1] or dim
    rows = torch.arange(99, -1, -1).view(25, 4)

    one = Gather(Table(fmt, dim, [whole], group=group), torch.bfloat16)(rows)
    many = Gather(Table(fmt, dim, parts, group=group), torch.bfloat16)(rows)

    assert same_bits(one, many)


def test_fp8_means_code_times_factor():
    """All 256 codes, NaN included, are torch's float8 values times the factor, rounded once."""
    codes = torch.arange(256).to(torch.uint8).view(16, 16)
    table = Table(Format.FP8, 16, [Shard(codes.view(torch.float8_e4m3fn), factor=0.3)])
    expected = torch.from_numpy(e4m3_table()) * np.float32(0.3)

    found = Gather(table, torch.float32)(torch.arange(16)[:, None]).flatten()

    assert torch.equal(found.isnan(), expected.isnan())
    assert found.isnan().sum() == 2
    numbers = ~expected.isnan()
    assert same_bits(found[numbers], expected[numbers])


def test_nvfp4_means_code_times_scale_times_factor():
    """All 16 codes under all finite scales: low nibble first, the exact product rounded once by the factor."""
    scales = torch.arange(127).to(torch.uint8).view(torch.float8_e4m3fn)[:, None]
    packed = torch.tensor([low | (low + 1) << 4 for low in range(0, 16, 2)], dtype=torch.uint8)
    factor = float(np.float32(0.0123))
    table = Table(Format.NVFP4, 16, [Shard(packed.expand(127, 8).contiguous(), scales, factor)])
    exact = torch.tensor(E2M1, dtype=torch.float64) * scales.double() * factor

    found = Gather(table, torch.float32)(torch.arange(127)[:, None])

    assert same_bits(found, exact.float())


def test_int4_means_nibble_less_eight_times_scale():
    """All 16 nibbles, low first."""
    packed = torch.tensor([[low | (low + 1) << 4 for low in range(0, 16, 2)]], dtype=torch.uint8)
    table = Table(Format.INT4, 16, [Shard(packed, torch.tensor([[0.25]]).half())])

    found = Gather(table, torch.float16)(torch.zeros(1, 1, dtype=torch.int64))

    assert found[0].tolist() == [(nibble - 8) / 4 for nibble in range(16)]


def test_int8_groups_have_their_own_scales():
    """The group of an element is its place / 16; one group a row is the other layout."""
    codes = torch.full((1, 40), 3, dtype=torch.int8)
    table = Table(Format.INT8, 40, [Shard(codes, torch.tensor([[1.0, 2.0, 0.5]]))])
    whole = Table(Format.INT8, 40, [Shard(codes, torch.tensor([[2.0]]))], group=40)
    row = torch.zeros(1, 1, dtype=torch.int64)

    assert Gather(table, torch.float32)(row)[0].tolist() == [3.0] * 16 + [6.0] * 16 + [1.5] * 8
    assert Gather(whole, torch.float32)(row)[0].tolist() == [6.0] * 40


@given(
    kind=st.sampled_from(KINDS),
    cuts=st.lists(st.integers(0, 12), max_size=3),
    seed=st.integers(0, 2**16),
)
def test_any_cut_of_a_batch_gives_the_same_rows(kind, cuts, seed):
    """A token's bits do not depend on what is gathered beside it."""
    table, _ = random_table(kind, (9, 9, 5), 24, seed)
    rows = torch.randint(0, 23, (12, 2), generator=torch.Generator().manual_seed(seed))
    gather = Gather(table, torch.bfloat16)
    borders = sorted({0, 12, *cuts})

    parts = [gather(rows[lo:hi].clone()) for lo, hi in itertools.pairwise(borders)]

    assert same_bits(torch.cat(parts), gather(rows))


def test_threads_do_not_change_bits():
    """Rows cut over three threads equal one thread's."""
    table, _ = random_table(KINDS[8], (500, 500, 123), 160)
    rows = torch.randint(0, 1123, (400, 16), generator=torch.Generator().manual_seed(1))
    pool = RowPool(3)
    try:
        assert same_bits(
            Gather(table, torch.bfloat16, pool)(rows), Gather(table, torch.bfloat16)(rows)
        )
    finally:
        pool.close()


def test_bound_buffers_are_read_anew_at_every_call():
    """A bound gather takes new ids from its buffer and leaves the rows past `tokens` alone."""
    table, _ = random_table(KINDS[1], (50,), 8)
    rows = torch.zeros(3, 2, dtype=torch.int64)
    out = torch.full((3, 16), 7.0)
    bound = Gather(table, torch.float32).bind(rows, out)
    values = dequantise(table)

    rows[:2] = torch.tensor([[1, 2], [49, 0]])
    bound(2)

    assert torch.equal(out[:2], values[rows[:2].flatten()].view(2, 16))
    assert (out[2] == 7.0).all()
    with pytest.raises(BadMetadata, match="the buffers hold 3"):
        bound(4)


@pytest.mark.parametrize("bad", [-1, 101, 2**62, -(2**63)])
def test_an_id_beyond_the_table_is_refused_first(bad):
    """The id and its place are named, and not one byte of the output is written."""
    table, _ = random_table(KINDS[0], (60, 41), 8)
    rows = torch.zeros(4, 2, dtype=torch.int64)
    rows[3, 1] = bad
    out = torch.full((4, 16), 7.0)

    with pytest.raises(BadIndex, match=rf"rows\[7\] is {bad}, and the table has 101 rows"):
        Gather(table, torch.float32)(rows, out)

    assert (out == 7.0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("kind", KINDS[3:], ids=IDS[3:])
def test_a_bad_scale_is_refused_first(kind, bad):
    """The row of the scale is named, before anything is written; rows with good scales still gather."""
    _, (shard,) = random_table(kind, (20,), 24)
    if kind[2] == torch.float8_e4m3fn and bad == float("inf"):
        bad = float("nan")  # E4M3 has no infinity
    shard.scales.view(20, -1)[13, -1] = bad
    table = Table(Format(kind[0]), 24, [shard], group=kind[1] or 24)
    out = torch.full((2, 24), 7.0)
    gather = Gather(table, torch.float32)

    with pytest.raises(BadScale, match="scales of row 13"):
        gather(torch.tensor([[0], [13]]), out)

    assert (out == 7.0).all()
    gather(torch.tensor([[0], [12]]), out)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), -1.0, 1e39])
def test_a_bad_factor_is_refused_at_once(factor):
    """A shard's factor must be a finite float32, not negative."""
    codes = torch.zeros(4, 8, dtype=torch.uint8).view(torch.float8_e4m3fn)

    with pytest.raises(BadScale, match="factor of shard 0"):
        Table(Format.FP8, 8, [Shard(codes, factor=factor)])


CODES = torch.zeros(4, 32, dtype=torch.int8)
SCALES = torch.ones(4, 2)
NIBBLES = torch.zeros(4, 16, dtype=torch.uint8)
BAD_TABLES = {
    "no shards": (BadMetadata, Format.FP32, [], 16),
    "codes of another type": (BadDtype, Format.BF16, [Shard(torch.zeros(4, 32))], 16),
    "an array of another type": (BadDtype, Format.BF16, [Shard(np.zeros((4, 32)))], 16),
    "an array of foreign bytes": (
        BadDtype,
        Format.FP32,
        [Shard(np.zeros((4, 32), dtype=">f4"))],
        16,
    ),
    "codes of another width": (BadShape, Format.FP32, [Shard(torch.zeros(4, 31))], 16),
    "strided codes": (BadLayout, Format.FP32, [Shard(torch.zeros(32, 4).t())], 16),
    "a strided array": (BadLayout, Format.FP32, [Shard(np.zeros((4, 64), np.float32)[:, ::2])], 16),
    "codes on another device": (
        BadLayout,
        Format.FP32,
        [Shard(torch.zeros(4, 32, device="meta"))],
        16,
    ),
    "scales missing": (BadMetadata, Format.INT8, [Shard(CODES)], 16),
    "scales too many": (BadMetadata, Format.FP32, [Shard(torch.zeros(4, 32), SCALES)], 16),
    "scales of another type": (BadDtype, Format.INT4, [Shard(NIBBLES, SCALES)], 16),
    "scales of another shape": (BadShape, Format.INT8, [Shard(CODES, torch.ones(4, 3))], 16),
    "scales that differ in type": (
        BadMetadata,
        Format.INT8,
        [Shard(CODES, SCALES), Shard(CODES, SCALES.half())],
        16,
    ),
    "a group of 8": (BadMetadata, Format.INT8, [Shard(CODES, torch.ones(4, 4))], 8),
    "a factor that means nothing": (
        BadMetadata,
        Format.FP32,
        [Shard(torch.zeros(4, 32), factor=2.0)],
        16,
    ),
    "a longer last shard": (
        BadMetadata,
        Format.FP32,
        [Shard(torch.zeros(4, 32)), Shard(torch.zeros(5, 32))],
        16,
    ),
    "no rows": (BadMetadata, Format.FP32, [Shard(torch.zeros(0, 32))], 16),
}


@pytest.mark.parametrize("name", BAD_TABLES)
def test_a_bad_table_is_refused(name):
    """What contradicts its format cannot become a table."""
    error, fmt, shards, group = BAD_TABLES[name]

    with pytest.raises(error):
        Table(fmt, 32, shards, group=group)


def test_unaligned_maps_are_refused(tmp_path):
    """A float32 that straddles its own width would be read by address; it is refused instead."""
    (tmp_path / "t").write_bytes(bytes(4 * 32 + 1))
    codes = np.memmap(tmp_path / "t", dtype=np.float32, mode="r", offset=1, shape=(1, 32))

    with pytest.raises(BadLayout, match="aligned"):
        Table(Format.FP32, 32, [Shard(codes)])


def test_odd_rows_of_nibbles_are_refused():
    """A row of packed codes has an even number of elements."""
    with pytest.raises(BadMetadata, match="two a byte"):
        Table(Format.NVFP4, 15, [Shard(torch.zeros(1, 7, dtype=torch.uint8))])


BAD_CALLS = {
    "int32 ids": (BadDtype, torch.zeros(2, 3, dtype=torch.int32), torch.empty(2, 24)),
    "flat ids": (BadShape, torch.zeros(6, dtype=torch.int64), torch.empty(2, 24)),
    "strided ids": (BadLayout, torch.zeros(3, 2, dtype=torch.int64).t(), torch.empty(2, 24)),
    "another output type": (
        BadDtype,
        torch.zeros(2, 3, dtype=torch.int64),
        torch.empty(2, 24).half(),
    ),
    "another output shape": (BadShape, torch.zeros(2, 3, dtype=torch.int64), torch.empty(2, 23)),
    "strided output": (BadLayout, torch.zeros(2, 3, dtype=torch.int64), torch.empty(24, 2).t()),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_buffers_are_refused(name):
    """Ids and output are checked when they are bound."""
    error, rows, out = BAD_CALLS[name]
    table, _ = random_table(KINDS[0], (10,), 8)

    with pytest.raises(error):
        Gather(table, torch.float32)(rows, out)


def test_an_output_type_without_a_kernel_is_refused():
    """float64 would promise digits that no table has."""
    table, _ = random_table(KINDS[0], (10,), 8)

    with pytest.raises(BadDtype, match="expected float32, bfloat16 or float16"):
        Gather(table, torch.float64)


@pytest.mark.parametrize("kind", KINDS[2:], ids=IDS[2:])
def test_flushed_denormals_do_not_change_a_row(kind):
    """A thread that treats subnormal numbers as zero still decodes E4M3's and E2M1's own subnormal codes."""
    table, _ = random_table(kind, (64,), 48)
    rows = torch.arange(64)[:, None]
    gather = Gather(table, torch.float32)
    expected = gather(rows)

    if not torch.set_flush_denormal(True):
        pytest.skip("this processor always honours subnormal numbers")
    try:
        flushed = gather(rows)
    finally:
        torch.set_flush_denormal(False)

    assert same_bits(flushed, expected)
