"""Hyper-connections against float64, transformers' module, and themselves in other batches."""

import random

import pytest
import torch

import oracle
from judge import judged
from stallwatch_kernels import jit, warmup
from stallwatch_kernels.admission import BadOverride
from stallwatch_kernels.errors import BadDtype, BadShape
from stallwatch_kernels.hc import reference
from stallwatch_kernels.hc.mixer import FUSED_BF16_ROWS, Mixer, MixerSpec
from stallwatch_kernels.hc.reference import Weights
from stallwatch_kernels.pool import RowPool

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [(4, 64, 16), (4, 512, 64), (2, 10, 3)]


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


def made(generator, size, dtype, fold=False):
    """Random weights, fan-in scaled, whose every part matters."""
    streams, hidden, rank = size
    width = streams * hidden

    def weight(rows, columns):
        return (torch.randn(rows, columns, generator=generator) * 2 / columns**0.5).to(dtype)

    return Weights(
        weight(rank, width) * streams,
        weight(width, rank) * 4,
        torch.randn(width, generator=generator) * 0.2,
        None if fold else weight(streams, width) * streams,
        streams,
        1e-6,
    )


def rows(generator, count, weights):
    return torch.randn(count, weights.norm.numel(), generator=generator).to(weights.down.dtype)


def double(w):
    inject = None if w.inject is None else w.inject.double()
    return Weights(w.down.double(), w.up.double(), w.norm.double(), inject, w.streams, w.eps)


@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_read_equals_float64(fresh, dtype, size, fold):
    """Mixed row and injection of a decode step, and the final fold, within the bounds of float64."""
    weights = made(fresh, size, dtype, fold)
    h = rows(fresh, 16, weights)
    x, gains = Mixer(weights).read(h)
    wanted, wanted_gains = reference.read(h.double(), double(weights))

    judged(x, wanted)
    if fold:
        assert gains is None
    else:
        judged(gains, wanted_gains)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_write_equals_float64_in_place(fresh, dtype, size):
    """Every stream receives its share of the block's output, in the same buffer."""
    weights = made(fresh, size, dtype)
    h = rows(fresh, 5, weights)
    y = torch.randn(5, size[1], generator=fresh).to(dtype)
    gains = torch.rand(5, size[0], generator=fresh) * 2
    wanted = reference.write(h.double(), y.double(), gains.double())

    assert Mixer(weights).write(h, y, gains) is h
    judged(h, wanted)


@pytest.mark.slow
def test_prefill_in_float32_equals_float64(fresh):
    """Many rows, more than one block and no whole number of blocks."""
    weights = made(fresh, (4, 64, 16), torch.float32)
    h = rows(fresh, 185, weights)

    judged(Mixer(weights).read(h)[0], reference.read(h.double(), double(weights))[0])


def in_bfloat16(h, w):
    """The read as a bfloat16 model in torch does it: every intermediate result is rounded."""
    normed = reference.rms_norm(h, w.norm, w.eps, h.shape[1] // w.streams)
    low = torch.nn.functional.silu(normed @ w.down.t() / w.streams)
    mix = torch.sigmoid(low @ w.up.t()) * normed
    gains = 2 * torch.sigmoid(normed @ w.inject.t() / w.streams)
    return mix.unflatten(-1, (w.streams, -1)).mean(-2), gains


def test_prefill_in_bfloat16_is_nearer_to_float64_than_torch(fresh):
    """More rows than the compiled read takes: the products are bfloat16, and little else is rounded."""
    weights = made(fresh, (4, 64, 16), torch.bfloat16)
    h = rows(fresh, FUSED_BF16_ROWS + 200, weights)
    exact = reference.read(h.double(), double(weights))
    for got, theirs, wanted in zip(
        Mixer(weights).read(h), in_bfloat16(h, weights), exact, strict=True
    ):
        assert (got.double() - wanted).norm() < (theirs.double() - wanted).norm()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8, 17, 40])
def test_a_row_has_the_same_bits_in_every_batch(fresh, pool, count):
    """In float32 the bits of a row do not depend on how many rows are read or written, nor on threads."""
    weights = made(fresh, (4, 64, 16), torch.float32)
    h = rows(fresh, 40, weights)
    y = torch.randn(40, 64, generator=fresh)
    mixer, threaded = Mixer(weights), Mixer(weights, pool)
    x, gains = mixer.read(h)
    few, few_gains = mixer.read(h[:count])
    wanted = mixer.write(h.clone(), y, gains)

    assert torch.equal(few, x[:count])
    assert torch.equal(few_gains, gains[:count])
    assert torch.equal(threaded.read(h)[0], x)
    assert torch.equal(mixer.write(h[:count].clone(), y[:count], gains[:count]), wanted[:count])
    assert torch.equal(threaded.write(h.clone(), y, gains), wanted)


def test_bound_call_computes_the_first_rows_only(fresh):
    """A bound read of three rows leaves the fourth row of its buffers alone."""
    weights = made(fresh, (4, 64, 16), torch.float32)
    h = rows(fresh, 4, weights)
    x, gains = torch.full((4, 64), 7.0), torch.full((4, 4), 7.0)
    Mixer(weights).bind_read(h, x, gains)(3)

    assert (x[3] == 7).all()
    assert (gains[3] == 7).all()
    assert not (x[:3] == 7).any()


def test_transformers_module_gives_the_same(fresh):
    """transformers' read, injection and final fold on the tiny model, with their own weights."""
    model = oracle.tiny_model().model
    modules = [model.layers[0].attn_hyper_connection, model.layers[3].mlp_hyper_connection]
    for module in [*modules, model.hyper_connection_mixer]:
        inject = module.block_inject_weight
        weights = Weights(
            module.input_mix_weight_down.weight,
            module.input_mix_weight_up.weight,
            module.hc_norm.weight,
            None if inject is None else inject.weight,
            module.hc_count,
            module.hc_norm.eps,
        )
        h = rows(fresh, 21, weights)
        with torch.no_grad():
            theirs = module(h)
        x, gains = Mixer(weights).read(h)
        wanted = theirs if inject is None else theirs[0]

        assert ((x - wanted).norm() / wanted.norm()).item() <= 1e-6
        if inject is not None:
            torch.testing.assert_close(gains, theirs[2], rtol=1e-5, atol=1e-6)


def test_implementation_can_be_overridden_but_not_against_its_refusal(fresh, monkeypatch):
    """STALLWATCH_KERNEL_HYPER_CONNECTION=gemm is refused in float32, whose bits must not depend on the batch."""
    weights = made(fresh, (4, 64, 16), torch.float32)
    monkeypatch.setenv("STALLWATCH_KERNEL_HYPER_CONNECTION", "gemm")
    with pytest.raises(BadOverride, match="every batch"):
        Mixer(weights).read(rows(fresh, 3, weights))


def test_bad_input_is_refused_by_name(fresh):
    """Contradicting weights, buffers and row counts are named errors."""
    w = made(fresh, (4, 64, 16), torch.float32)
    h, x, gains = rows(fresh, 3, w), torch.empty(3, 64), torch.empty(3, 4)
    mixer = Mixer(w)
    with pytest.raises(BadShape, match="no 3 streams"):
        Mixer(Weights(w.down, w.up, w.norm, None, 3, 1e-6))
    with pytest.raises(BadShape, match="up, norm"):
        Mixer(Weights(w.down, w.up.t(), w.norm, None, 4, 1e-6))
    with pytest.raises(BadShape, match="inject"):
        Mixer(Weights(w.down, w.up, w.norm, w.inject.t(), 4, 1e-6))
    with pytest.raises(BadDtype, match="all float32"):
        Mixer(Weights(w.down, w.up.bfloat16(), w.norm, None, 4, 1e-6))
    with pytest.raises(BadDtype, match="h is bfloat16"):
        mixer.bind_read(h.bfloat16(), x, gains)
    with pytest.raises(BadShape, match="injection"):
        mixer.bind_read(h, x)
    with pytest.raises(BadShape, match="same number of rows"):
        mixer.bind_read(h, x[:2], gains)
    with pytest.raises(BadShape, match="same number of rows"):
        mixer.bind_write(h, x, gains[:2])
    with pytest.raises(BadShape, match="the buffers hold 3"):
        mixer.bind_read(h, x, gains)(4)


@pytest.mark.slow
def test_warmup_leaves_nothing_to_compile(fresh):
    """After the warm-up, decode and prefill of both types compile nothing more."""
    specs = [MixerSpec(4, 64, 16, d, fold=f) for d in DTYPES for f in (False, True)]
    warmup.run(warmup.tasks(specs, warmup.Shapes(rows=(1, 64))))
    before = jit.signatures()
    for spec in specs:
        weights = made(fresh, (4, 64, 16), spec.dtype, spec.fold)
        for count in (1, 40):
            h = rows(fresh, count, weights)
            x, gains = Mixer(weights).read(h)
            if gains is not None:
                Mixer(weights).write(h, x, gains)

    assert warmup.grown(before, jit.signatures()) == {}
