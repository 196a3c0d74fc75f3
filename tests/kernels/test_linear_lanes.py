"""The vector code itself: every tile gives the same bits, and both ways to decode a nibble agree."""

from __future__ import annotations

import numba
import numpy as np
import pytest
import torch

from stallwatch_kernels.linear import vectors
from stallwatch_kernels.linear.lanes import expansion, strip
from stallwatch_kernels.linear.panel import address
from stallwatch_kernels.nvfp4 import codec
from stallwatch_kernels.tensors import e4m3_table


def packed(rows: int, k: int, seed: int) -> codec.Packed:
    """Random codes (all sixteen) under random finite scales of both signs; global 1."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, k // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(0, 0x7F, (rows, k // 16), generator=generator, dtype=torch.uint8)
    signs = torch.randint(0, 2, scales.shape, generator=generator, dtype=torch.uint8) << 7
    return codec.Packed(codes, (scales | signs).view(torch.float8_e4m3fn), torch.tensor(1.0))


@pytest.mark.slow
@pytest.mark.parametrize("permute", [False, True])
def test_decoding_gives_twice_the_codes(permute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By table register or by integer arithmetic, a decoded weight is exactly 2 * code * scale."""
    if permute and not vectors.HAS_PERMUTE:
        pytest.skip("this processor has no permute of 16 floats")
    monkeypatch.setattr(vectors, "HAS_PERMUTE", permute)
    expand = expansion(1, vectors.NVFP4)

    @numba.njit(error_model="numpy")
    def decode(codes, scales, table, out):
        k = out.shape[0]
        expand(address(codes), 0, address(scales), 0, address(table), k, address(out), 0)

    for k in (16, 64, 208):
        weights = packed(1, k, seed=k)
        out = np.zeros(k, np.float32)
        decode(
            weights.codes[0].numpy(),
            weights.scales[0].view(torch.uint8).numpy(),
            e4m3_table(),
            out,
        )

        assert out.tolist() == (codec.dequantise(weights, torch.float64)[0] * 2).tolist()


@pytest.mark.slow
def test_tiles_of_any_size_give_the_same_bits() -> None:
    """Products in tiles of 1 x 1, 3 x 2 and 4 x 4 are bit for bit those of the written order."""
    tiles = [strip(c, vectors.F32, r, ahead=r == 4) for r, c in ((1, 1), (3, 2), (4, 4))]
    one, six, sixteen = tiles

    @numba.njit(error_model="numpy")
    def run(x, w, y, which):
        k = x.shape[1]
        columns = (1, 2, 4)[which]
        for n in range(0, w.shape[0], columns):
            at_w, at_y = address(w) + n * 4 * k, address(y) + n * 4
            if which == 0:
                one(address(x), 4 * k, at_w, 4 * k, 0, 0, 0, k, at_y, 4 * w.shape[0], x.shape[0])
            elif which == 1:
                six(address(x), 4 * k, at_w, 4 * k, 0, 0, 0, k, at_y, 4 * w.shape[0], x.shape[0])
            else:
                sixteen(
                    address(x), 4 * k, at_w, 4 * k, 0, 0, 0, k, at_y, 4 * w.shape[0], x.shape[0]
                )

    generator = np.random.default_rng(1)
    x = generator.standard_normal((7, 75), dtype=np.float32)
    w = generator.standard_normal((8, 75), dtype=np.float32)
    results = []
    for which in range(3):
        y = np.full((7, 8), np.nan, np.float32)
        run(x, w, y, which)
        results.append(y)

    assert np.array_equal(results[0], in_written_order(x, w))
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])


def in_written_order(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Sixteen lanes by fused multiply-add, then halves onto halves, in float64 rounded at every step."""
    k = -(-x.shape[1] // 16) * 16
    wide_x, wide_w = (np.pad(a, ((0, 0), (0, k - a.shape[1]))).astype(np.float64) for a in (x, w))
    lanes = np.zeros((x.shape[0], w.shape[0], 16))
    for first in range(0, k, 16):
        part = slice(first, first + 16)
        # a product of two float32 is exact in float64; the sum is rounded twice, which two inputs in 2^29 notice
        lanes = (lanes + wide_x[:, None, part] * wide_w[None, :, part]).astype(np.float32)
        lanes = lanes.astype(np.float64)
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = (lanes[..., :half] + lanes[..., half:]).astype(np.float32).astype(np.float64)
    return lanes[..., 0].astype(np.float32)
