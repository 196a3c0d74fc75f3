"""RMS norms against float64, against transformers' modules, and against themselves in other batches."""

import random

import numpy as np
import pytest
import torch
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextRMSNormGated

import oracle
from judge import judged
from stallwatch_kernels import jit, warmup
from stallwatch_kernels.errors import BadDtype, BadLayout, BadMetadata, BadShape
from stallwatch_kernels.jit import kernel
from stallwatch_kernels.norm import reference
from stallwatch_kernels.norm.rms import ACTIVATIONS, GatedRmsNorm, RmsNorm, RmsSpec
from stallwatch_kernels.norm.scalar import exp32
from stallwatch_kernels.pool import RowPool

EPS = 1e-6
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def fresh():
    """Random numbers that differ from run to run and come back with its seed (-p randomly)."""
    return torch.Generator().manual_seed(random.randrange(2**31))


@pytest.fixture
def pool():
    """Two threads."""
    threads = RowPool(2)
    yield threads
    threads.close()


@kernel
def exp_all(x, out):
    for i in range(x.shape[0]):
        out[i] = exp32(x[i])


def test_exp_is_within_two_ulp_and_keeps_nan():
    """exp32 is within 2 ulp over its whole range, saturates outside of it and passes NaN on."""
    x = np.linspace(-87, 88, 400_001, dtype=np.float32)
    out = np.empty_like(x)
    exp_all(x, out)
    exact = np.exp(x.astype(np.float64))
    edge = np.array([-1e9, 1e9, np.nan], dtype=np.float32)
    exp_all(edge, edge)

    assert np.abs((out - exact) / np.spacing(exact.astype(np.float32))).max() <= 2
    assert edge[0] < 2e-38
    assert edge[1] > 1e38
    assert np.isnan(edge[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "group"), [(512, None), (2048, 512), (192, 48), (10, 5)])
def test_norm_equals_float64(fresh, dtype, width, group):
    """(1 + w) norm over a row and over each stream of it, within the bounds of float64."""
    x = (torch.randn(64, width, generator=fresh) * 3).to(dtype)
    weight = torch.randn(width, generator=fresh)

    judged(RmsNorm(weight, EPS, group)(x), reference.rms_norm(x.double(), weight, EPS, group))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_norm_equals_float64(fresh, dtype, activation):
    """The gated norm over each head, plain weight, either gate, within the bounds of float64."""
    x, z = (torch.randn(2, 64, 8 * 64, generator=fresh) * 2).to(dtype)
    weight = torch.randn(64, generator=fresh)

    judged(
        GatedRmsNorm(weight, EPS, activation=activation)(x, z),
        reference.gated_rms_norm(x.double(), z.double(), weight, EPS, activation=activation),
    )


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_every_batch(fresh, pool, dtype, rows):
    """The bits of a row do not depend on how many rows are computed, nor on the threads."""
    x, z = torch.randn(2, 8, 256, generator=fresh).to(dtype)
    weight = torch.randn(256, generator=fresh)
    norm, gated = RmsNorm(weight, EPS, 64), GatedRmsNorm(weight[:64], EPS)

    assert torch.equal(norm(x[:rows]), norm(x)[:rows])
    assert torch.equal(gated(x[:rows], z[:rows]), gated(x, z)[:rows])
    assert torch.equal(RmsNorm(weight, EPS, 64, pool)(x), norm(x))


def test_modules_of_transformers_give_the_same(fresh):
    """transformers' plain, grouped and gated norm of the tiny model, with their weights."""
    layer = oracle.tiny_model().model.layers[0]
    plain, gated = layer.attn_hyper_connection.hc_norm, layer.linear_attn.norm
    x = torch.randn(33, plain.weight.numel(), generator=fresh)
    z = torch.randn(33, gated.weight.numel(), generator=fresh)
    with torch.no_grad():
        wanted = plain(x)
        wanted_gated = gated(x[:, : z.shape[1]].contiguous(), z)

    torch.testing.assert_close(
        RmsNorm(plain.weight, plain.eps, plain.group_size)(x), wanted, rtol=2e-6, atol=1e-6
    )
    torch.testing.assert_close(
        GatedRmsNorm(gated.weight, gated.variance_epsilon)(x[:, : z.shape[1]], z),
        wanted_gated,
        rtol=2e-6,
        atol=1e-6,
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_either_gate_is_that_of_transformers(fresh, activation):
    """transformers' gated norm with the activation that output_gate_type names."""
    judge = Qwen4ExpTextRMSNormGated(16, EPS, activation)
    x, z = torch.randn(2, 33, 16, generator=fresh)
    with torch.no_grad():
        judge.weight.copy_(torch.randn(16, generator=fresh))
        wanted = judge(x, z)
    found = GatedRmsNorm(judge.weight, EPS, activation=activation)(x, z)
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=1e-6)


def test_rows_apart_are_read_in_place_and_only_they_are_written(fresh):
    """A slice of a wider buffer is normed where it lies; the columns beside it and later rows stay."""
    buffer = torch.randn(6, 100, generator=fresh)
    before = buffer.clone()
    weight = torch.randn(32, generator=fresh)
    view = buffer[:, 20:52]
    RmsNorm(weight, EPS).bind(view, view)(4)

    assert torch.equal(buffer[:4, 20:52], RmsNorm(weight, EPS)(before[:4, 20:52].contiguous()))
    buffer[:4, 20:52] = before[:4, 20:52]
    assert torch.equal(buffer, before)


def test_bad_input_is_refused_by_name():
    """Wrong type, width, stride and row count are named errors."""
    norm = RmsNorm(torch.zeros(32), EPS)
    x = torch.zeros(4, 32)
    with pytest.raises(BadDtype, match="x is float16"):
        norm(x.half())
    with pytest.raises(BadDtype, match="not one type"):
        norm.bind(x, x.bfloat16())
    with pytest.raises(BadShape, match="expected"):
        norm(torch.zeros(4, 31))
    with pytest.raises(BadLayout, match="whole rows"):
        norm(torch.zeros(32, 4).t())
    with pytest.raises(BadShape, match="the buffers hold 4"):
        norm.bind(x, x)(5)
    with pytest.raises(BadShape, match="no row of 5s"):
        RmsNorm(torch.zeros(32), EPS, 5)
    with pytest.raises(BadShape, match="no heads of 5"):
        GatedRmsNorm(torch.ones(5), EPS)(x, x)
    with pytest.raises(BadMetadata, match="activation is 'relu'"):
        GatedRmsNorm(torch.ones(32), EPS, activation="relu")


def test_warmup_leaves_nothing_to_compile(fresh):
    """After the warm-up of its spec, a norm compiles nothing more."""
    specs = [RmsSpec(64, 32, d, gated=g) for d in DTYPES for g in (False, True)]
    specs += [RmsSpec(64, 32, d, gated=True, activation="sigmoid") for d in DTYPES]
    warmup.run(warmup.tasks(specs, warmup.Shapes(rows=(1, 4))))
    before = jit.signatures()
    for dtype in DTYPES:
        x = torch.randn(3, 64, generator=fresh).to(dtype)
        RmsNorm(torch.zeros(64), EPS, 32)(x)
        for activation in ACTIVATIONS:
            GatedRmsNorm(torch.ones(32), EPS, activation=activation)(x, x)

    assert warmup.grown(before, jit.signatures()) == {}
