"""NVFP4: what a code means, how weights become codes, and what is refused."""

from __future__ import annotations

import pytest
import torch

from stallwatch_kernels.errors import BadDtype, BadScale, BadShape
from stallwatch_kernels.nvfp4 import codec

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
GLOBAL = torch.tensor(0.375)  # a power of two times 3: products with codes and scales stay exact


def finite_scales() -> torch.Tensor:
    """Every E4M3 value that is a number, both signs."""
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    return codes[codes & 0x7F != 0x7F].view(torch.float8_e4m3fn)


def gaussian(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_all_codes_times_all_scales_are_exact() -> None:
    """Each of 16 codes under each of 254 finite scales is code * scale * global, in float32 as in float64."""
    scales = finite_scales()[:, None]
    codes = codec.pack(torch.arange(16, dtype=torch.uint8)).expand(len(scales), 8)
    packed = codec.Packed(codes, scales, GLOBAL)

    expected = [
        [sign * value * float(scale) * 0.375 for sign in (1, -1) for value in VALUES]
        for scale in scales.flatten().double().tolist()
    ]

    assert codec.dequantise(packed).tolist() == expected
    assert codec.dequantise(packed, torch.float64).tolist() == expected


def test_low_nibble_comes_first() -> None:
    """Byte 0x21 is 0.5, then 1.0."""
    codes = torch.tensor([0x21] + [0] * 7, dtype=torch.uint8)
    packed = codec.Packed(codes, torch.ones(1).to(torch.float8_e4m3fn), torch.tensor(1.0))

    assert codec.dequantise(packed)[:2].tolist() == [0.5, 1.0]


def test_codes_round_to_nearest_and_ties_to_even() -> None:
    """Halfway between two codes the even one wins; on either side of halfway the nearer one."""
    borders = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    even = [0, 2, 2, 4, 4, 6, 6]
    least = torch.finfo(torch.float32).eps * 4
    for border, tie, below in zip(borders, even, range(7), strict=True):
        row = torch.tensor([border, border - least, border + least, -border] + [0.0] * 11 + [6.0])

        packed = codec.quantise(row, torch.tensor(1.0))

        assert packed.scales.float().tolist() == [1.0]
        expected = [tie, below, below + 1, 8 + tie]
        assert codec.unpack(packed.codes)[:4].tolist() == expected


def test_quantise_is_idempotent_where_scales_are_normal() -> None:
    """Requantising with the same global returns the same bytes in every block with a normal scale (>= 2^-6)."""
    weights = gaussian(96, 512, seed=1) * torch.logspace(-5, 2, 96)[:, None]
    first = codec.quantise(weights)
    second = codec.quantise(codec.dequantise(first), first.global_scale)
    normal = first.scales.float() >= 2.0**-6
    same = (first.scales.float() == second.scales.float()) & (
        (first.codes == second.codes).unflatten(-1, (-1, 8)).all(-1)
    )

    assert bool(same[normal].all())
    assert bool(normal.any())
    assert bool((~normal).any()), "the input must also reach subnormal scales"


def test_gaussian_error_is_that_of_the_format() -> None:
    """The relative error on Gaussian weights lies between 0.090 and 0.100."""
    weights = gaussian(256, 1024, seed=2)
    error = codec.dequantise(codec.quantise(weights)) - weights

    assert 0.090 < float(error.norm() / weights.norm()) < 0.100


def test_zero_blocks_have_zero_scale_and_zero_codes() -> None:
    """A block of zeros, and one too small for any scale, is all zero and divides by nothing."""
    weights = gaussian(1, 48, seed=3)
    weights[0, :16] = 0.0
    weights[0, 16:32] = -1e-12
    packed = codec.quantise(weights)

    assert packed.scales.float()[0, :2].tolist() == [0.0, 0.0]
    assert not bool(packed.codes[0, :16].any())
    assert bool(torch.isfinite(codec.dequantise(packed)).all())
    assert codec.dequantise(codec.quantise(torch.zeros(2, 16))).tolist() == [[0.0] * 16] * 2


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_scale_is_refused(code: int) -> None:
    """The two E4M3 codes that are no number are refused by name, never turned into weights."""
    packed = codec.quantise(gaussian(4, 32, seed=4))
    packed.scales.view(torch.uint8)[2, 1] = code

    with pytest.raises(BadScale, match="NaN") as refused:
        codec.dequantise(packed)
    assert refused.value.argument == "scales"


def test_parts_that_do_not_fit_are_refused() -> None:
    """Wrong types, a scale too few, a ragged K, a global of zero and weights without a size are named."""
    packed = codec.quantise(gaussian(4, 32, seed=5))
    with pytest.raises(BadShape, match="scales"):
        codec.dequantise(codec.Packed(packed.codes, packed.scales[:, :1], packed.global_scale))
    with pytest.raises(BadDtype, match="codes"):
        codec.dequantise(codec.Packed(packed.codes.int(), packed.scales, packed.global_scale))
    with pytest.raises(BadDtype, match="scales"):
        codec.dequantise(codec.Packed(packed.codes, packed.scales.float(), packed.global_scale))
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(BadScale, match="global"):
            codec.quantise(gaussian(1, 16, seed=6), torch.tensor(bad))
    with pytest.raises(BadShape, match="16"):
        codec.quantise(gaussian(2, 17, seed=7))
    with pytest.raises(BadScale, match="finite"):
        codec.quantise(torch.tensor([float("nan")] * 16))
