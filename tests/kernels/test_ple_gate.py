"""The PLE gate against float64, and against itself in other batches."""

from __future__ import annotations

import math

import pytest
import torch

from judge import judged
from kernel_ops import away_from_zero
from stallwatch_kernels import jit, warmup
from stallwatch_kernels.errors import BadDtype, BadLayout, BadMetadata, BadScale, BadShape
from stallwatch_kernels.ple.gate import KERNEL, Gate, GateSpec, GateWeights, reference
from stallwatch_kernels.pool import RowPool

STREAMS = 4
DTYPES = [torch.float32, torch.bfloat16]


def random_weights(hidden, generator):
    key, query, conv = (torch.randn(STREAMS * hidden, generator=generator) * 0.2 for _ in range(3))
    return GateWeights(key, query, conv, STREAMS)


def random_inputs(rows, hidden, generator, dtype=torch.float32):
    """keys and values are slices of one projection, as a merged weight yields them."""
    merged = torch.randn(rows, (STREAMS + 1) * hidden, generator=generator).to(dtype)
    keys, values = merged[:, : STREAMS * hidden], merged[:, STREAMS * hidden :]
    noise = torch.randn(rows, STREAMS * hidden, generator=generator) * 3
    return keys, values, away_from_zero(keys, noise, STREAMS).to(dtype)


def exact(weights, inputs):
    """The reference in float64."""
    wide = GateWeights(
        weights.key.double(), weights.query.double(), weights.conv.double(), STREAMS, weights.eps
    )
    return reference(wide, *(tensor.double() for tensor in inputs))


@pytest.fixture
def fresh():
    """Random numbers that differ from run to run."""
    return torch.Generator().manual_seed(torch.seed() % 2**31)


@pytest.mark.parametrize("hidden", [64, 37, 640])
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_float32_agrees_with_float64(hidden, rows, fresh):
    """Relative L2 at most 1e-6 for u and c."""
    weights = random_weights(hidden, fresh)
    inputs = random_inputs(rows, hidden, fresh)

    found = Gate(weights)(*inputs, tokens=rows)

    for got, expected in zip(found, exact(weights, inputs), strict=True):
        judged(got, expected)


def test_bfloat16_rounds_once(fresh):
    """Within the bar that all kernels share, for u and c."""
    weights = random_weights(320, fresh)
    inputs = random_inputs(49, 320, fresh, torch.bfloat16)

    found = Gate(weights)(*inputs, tokens=49)

    for got, expected in zip(found, exact(weights, inputs), strict=True):
        judged(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 8])
def test_a_row_has_the_same_bits_in_any_batch(dtype, batch, fresh):
    """Each row of 24 in batches of 1, 2, 3, 4 and 8 equals itself in the whole."""
    gate = Gate(random_weights(80, fresh))
    inputs = random_inputs(24, 80, fresh, dtype)
    whole = gate(*inputs, tokens=24)

    for lo in range(0, 24, batch):
        part = gate(*(tensor[lo : lo + batch] for tensor in inputs), tokens=batch)
        for got, expected in zip(part, whole, strict=True):
            assert torch.equal(got, expected[lo : lo + batch])


def test_threads_do_not_change_bits(fresh):
    """Rows cut over three threads equal one thread's."""
    weights, inputs = random_weights(40, fresh), random_inputs(50, 40, fresh)
    pool = RowPool(3)
    try:
        threaded = Gate(weights, pool)(*inputs, tokens=45)
    finally:
        pool.close()

    for got, expected in zip(threaded, Gate(weights)(*inputs, tokens=45), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_rows_are_zero(dtype, fresh):
    """Rows from `tokens` on are zero in u and c, NaN in their inputs notwithstanding."""
    inputs = random_inputs(6, 32, fresh, dtype)
    for tensor in inputs:
        tensor[4:] = float("nan")

    u, c = Gate(random_weights(32, fresh))(*inputs, tokens=4)

    assert not u[4:].any()
    assert not c[4:].any()
    assert u[:4].abs().min() > 0
    assert torch.isfinite(c[:4]).all()


def test_orthogonal_key_and_query_give_half():
    """d = 0 has sign 0, so the gate is one half; a small d is lifted to sqrt(1e-6)."""
    hidden = 2
    zeros = torch.zeros(STREAMS * hidden)
    keys = torch.tensor([[1.0, 0.0] * STREAMS])
    queries = torch.tensor([[0.0, 1.0, 1e-9, 1.0, -1e-9, 1.0, 0.0, 0.0]])
    values = torch.tensor([[8.0, -2.0]])

    u, _ = Gate(GateWeights(zeros, zeros, zeros, STREAMS))(keys, values, queries, tokens=1)

    up, down = (1 / (1 + math.exp(-d)) for d in (1e-3, -1e-3))
    expected = torch.tensor(
        [gain * value for gain in (0.5, up, down, 0.5) for value in (8.0, -2.0)]
    )
    assert torch.allclose(u[0], expected, rtol=1e-6, atol=0)


def test_nan_stays_in_its_row_and_stream(fresh):
    """A NaN in one stream of one row shows there, and nowhere else."""
    keys, values, hidden = random_inputs(3, 16, fresh)
    hidden[1, 16 + 5] = float("nan")

    u, _ = Gate(random_weights(16, fresh))(keys, values, hidden, tokens=3)

    expected = torch.zeros(3, STREAMS, 16, dtype=torch.bool)
    expected[1, 1] = True
    assert torch.equal(u.view(3, STREAMS, 16).isnan(), expected)


def test_the_torch_path_can_be_chosen(fresh, monkeypatch):
    """The operator's override runs the reference, padding included."""
    weights, inputs = random_weights(32, fresh), random_inputs(5, 32, fresh)
    fast = Gate(weights)(*inputs, tokens=4)
    monkeypatch.setenv("STALLWATCH_KERNEL_PLE_GATE", "torch")

    plain = Gate(weights)
    slow = plain(*inputs, tokens=4)

    assert plain.choice.impl == "torch"
    for got, expected in zip(fast, slow, strict=True):
        assert torch.allclose(got, expected, rtol=1e-5, atol=1e-6)
        assert not expected[4:].any()


def test_warm_up_leaves_nothing_to_compile(fresh):
    """After the tasks of both dtypes, calls of other shapes compile nothing."""
    warmup.run(warmup.tasks([GateSpec(STREAMS, 64, dtype) for dtype in DTYPES], warmup.Shapes()))
    before = jit.signatures()

    for dtype in DTYPES:
        Gate(random_weights(32, fresh))(*random_inputs(9, 32, fresh, dtype), tokens=8)

    assert warmup.grown(before, jit.signatures()) == {}


WEIGHT = torch.zeros(32)
KEYS, VALUES = torch.zeros(3, 32), torch.zeros(3, 8)
BAD_CALLS = {
    "keys of another type": (BadDtype, "keys", {"keys": KEYS.bfloat16()}),
    "all of a type without a kernel": (
        BadDtype,
        "keys",
        {"keys": KEYS.half(), "values": VALUES.half(), "hidden": KEYS.half()},
    ),
    "keys of another width": (BadShape, "keys", {"keys": torch.zeros(3, 31)}),
    "values of other rows": (BadShape, "values", {"values": torch.zeros(2, 8)}),
    "columns apart": (BadLayout, "hidden", {"hidden": torch.zeros(3, 64)[:, ::2]}),
    "rows that overlap": (BadLayout, "hidden", {"hidden": torch.zeros(1, 32).expand(3, 32)}),
    "more tokens than rows": (BadMetadata, "tokens", {"tokens": 4}),
    "an output of another shape": (BadShape, "u", {"u": torch.zeros(3, 33)}),
    "an output of another type": (BadDtype, "c", {"c": KEYS.bfloat16()}),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_input_is_refused_by_name(name):
    """Each contradiction raises its own error, naming the argument."""
    error, argument, change = BAD_CALLS[name]
    given = {"keys": KEYS, "values": VALUES, "hidden": KEYS, "tokens": 3}

    with pytest.raises(error) as refusal:
        Gate(GateWeights(WEIGHT, WEIGHT, WEIGHT, STREAMS))(**{**given, **change})

    assert refusal.value.argument == argument
    assert refusal.value.kernel == KERNEL


@pytest.mark.parametrize("eps", [0.0, -1.0, math.nan, math.inf])
def test_a_bad_eps_is_refused(eps):
    """A norm's eps is finite and positive."""
    with pytest.raises(BadScale, match="eps"):
        GateWeights(WEIGHT, WEIGHT, WEIGHT, STREAMS, eps)


def test_weights_that_do_not_fit_are_refused():
    """Streams divide the width, and the three norms have one shape."""
    with pytest.raises(BadShape, match="streams"):
        GateWeights(WEIGHT, WEIGHT, WEIGHT, 5)
    with pytest.raises(BadShape, match="query"):
        GateWeights(WEIGHT, torch.zeros(31), WEIGHT, STREAMS)


def test_bound_buffers_are_read_anew_at_every_call(fresh):
    """A bound gate takes what its buffers hold, zeroes padding, and leaves the rows behind alone."""
    gate = Gate(random_weights(24, fresh))
    keys, values, hidden = random_inputs(6, 24, fresh)
    u, c = torch.full((6, 96), 7.0), torch.full((6, 96), 7.0)
    bound = gate.bind(keys, values, hidden, u=u, c=c)
    hidden.neg_()
    expected = gate(keys, values, hidden, tokens=6)

    bound(3, 5)

    for got, whole in zip((u, c), expected, strict=True):
        assert torch.equal(got[:3], whole[:3])
        assert not got[3:5].any()
        assert (got[5] == 7.0).all()
    for tokens, rows in ((4, 3), (1, 7), (-1, 2)):
        with pytest.raises(BadMetadata, match="tokens"):
            bound(tokens, rows)
