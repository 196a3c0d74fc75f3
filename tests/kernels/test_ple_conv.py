"""The PLE convolution against float64, over any split, with slots, null slots and padding."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from judge import judged
from stallwatch_kernels import jit, warmup
from stallwatch_kernels.errors import BadDtype, BadIndex, BadLayout, BadMetadata, BadShape
from stallwatch_kernels.gdn.batch import NULL_SLOT, Carried
from stallwatch_kernels.ple.conv import Conv, PleConvSpec, reference
from stallwatch_kernels.pool import RowPool

TAPS, DILATION, HISTORY = 4, 3, 9
DTYPES = [torch.float32, torch.bfloat16]


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def randn(generator, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=generator).to(dtype)


@pytest.fixture
def fresh():
    """Random numbers that differ from run to run."""
    return torch.Generator().manual_seed(torch.seed() % 2**31)


@pytest.mark.parametrize("channels", [256, 37, 2500])
def test_float32_agrees_with_float64(channels, fresh):
    """Relative L2 at most 1e-6 over requests of 0 to 40 tokens with states, which end as exactly as they should."""
    weight = randn(fresh, channels, TAPS) * 0.5
    starts, slots = ints(0, 5, 5, 6, 46), ints(2, 4, 0, 1)
    u, c = randn(fresh, 46, channels), randn(fresh, 46, channels)
    state = randn(fresh, 5, HISTORY, channels)
    wide = Carried(state.double(), slots, starts)
    expected = reference(weight.double(), DILATION, u.double(), c.double(), carried=wide)
    untouched = state[3].clone(), state[4].clone()

    out = Conv(weight, DILATION)(u, c, Carried(state, slots, starts))

    judged(out, expected)
    assert torch.equal(state.double(), wide.state)
    assert torch.equal(state[3], untouched[0])
    assert torch.equal(state[4], untouched[1])


def test_bfloat16_rounds_once(fresh):
    """Within the bar that all kernels share, and the state that is left has the very bits."""
    weight = randn(fresh, 320, TAPS) * 0.5
    u, c = (randn(fresh, 30, 320, dtype=torch.bfloat16) for _ in range(2))
    state = randn(fresh, 2, HISTORY, 320, dtype=torch.bfloat16)
    batch = Carried(state, ints(1, 0), ints(0, 4, 30))
    wide = replace(batch, state=state.double())
    expected = reference(weight.double(), DILATION, u.double(), c.double(), carried=wide)

    out = Conv(weight, DILATION)(u, c, batch)

    judged(out, expected)
    assert torch.equal(state.double(), wide.state)


@given(
    cuts=st.lists(st.integers(0, 24), max_size=8),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
)
def test_any_split_gives_the_same_bits(cuts, dtype, seed):
    """A sequence of 24 tokens in any chunks, down to one by one or empty, equals itself in one piece."""
    generator = torch.Generator().manual_seed(seed)
    conv = Conv(randn(generator, 40, TAPS), DILATION)
    u, c = (randn(generator, 24, 40, dtype=dtype) for _ in range(2))
    whole = Carried(conv.new_state(1, dtype), ints(0), ints(0, 24))
    expected = conv(u, c, whole)
    state = conv.new_state(1, dtype)

    parts = [
        conv(u[lo:hi], c[lo:hi], Carried(state, ints(0), ints(0, hi - lo)))
        for lo, hi in itertools.pairwise([0, *sorted(cuts), 24])
    ]

    assert torch.equal(torch.cat(parts), expected)
    assert torch.equal(state, whole.state)


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 8])
def test_a_decode_row_has_the_same_bits_in_any_batch(batch, fresh):
    """One token of each of 8 requests, stepped in batches of 1, 2, 3, 4 and 8."""
    conv = Conv(randn(fresh, 100, TAPS), DILATION)
    u, c = randn(fresh, 8, 100), randn(fresh, 8, 100)
    state = randn(fresh, 8, HISTORY, 100)
    whole = Carried(state.clone(), torch.arange(8, dtype=torch.int32), torch.arange(9).int())
    expected = conv(u, c, whole)

    for lo in range(0, 8, batch):
        rows = min(batch, 8 - lo)
        slots = torch.arange(lo, lo + rows, dtype=torch.int32)
        part = Carried(state, slots, torch.arange(rows + 1).int())
        assert torch.equal(
            conv(u[lo : lo + rows], c[lo : lo + rows], part), expected[lo : lo + rows]
        )
    assert torch.equal(state, whole.state)


def test_threads_do_not_change_bits(fresh):
    """Tokens cut over three threads in the middle of a request equal one thread's."""
    weight = randn(fresh, 64, TAPS)
    u, c, state = randn(fresh, 90, 64), randn(fresh, 90, 64), randn(fresh, 2, HISTORY, 64)
    starts, slots = ints(0, 70, 88), ints(0, 1)
    one, three = (Carried(state.clone(), slots, starts) for _ in range(2))
    pool = RowPool(3)
    try:
        threaded = Conv(weight, DILATION, pool)(u, c, three)
    finally:
        pool.close()

    assert torch.equal(threaded, Conv(weight, DILATION)(u, c, one))
    assert torch.equal(three.state, one.state)


@pytest.mark.parametrize("dtype", DTYPES)
def test_null_slots_and_padding_touch_no_state(dtype, fresh):
    """Their rows come out zero; the neighbours' rows and every state are as without them."""
    conv = Conv(randn(fresh, 48, TAPS), DILATION)
    u, c = (randn(fresh, 9, 48, dtype=dtype) for _ in range(2))
    state = randn(fresh, 2, HISTORY, 48, dtype=dtype)
    alone = Carried(state.clone(), ints(1), ints(0, 3))
    expected = conv(u[2:5], c[2:5], alone)

    out = conv(u, c, Carried(state, ints(NULL_SLOT, 1, NULL_SLOT), ints(0, 2, 5, 7)))

    assert torch.equal(out[2:5], expected)
    assert not out[:2].any()
    assert not out[5:].any()
    assert torch.equal(state, alone.state)


def test_the_output_may_replace_u_and_rows_may_lie_apart(fresh):
    """In place, and over wider rows, the bits are the same."""
    conv = Conv(randn(fresh, 33, TAPS), DILATION)
    u, c = randn(fresh, 20, 33), randn(fresh, 20, 33)
    wide = randn(fresh, 20, 80)
    wide[:, :33], wide[:, 40:73] = u, c
    expected = conv(u, c, Carried(conv.new_state(1), ints(0), ints(0, 20)))

    views = wide[:, :33], wide[:, 40:73]
    conv(*views, Carried(conv.new_state(1), ints(0), ints(0, 20)), out=views[0])

    assert torch.equal(wide[:, :33], expected)
    assert torch.equal(wide[:, 40:73], c)


def test_the_taps_lie_at_multiples_of_the_dilation():
    """An impulse comes out at 0, 3, 6 and 9 tokens, the last tap first."""
    conv = Conv(torch.tensor([[4.0, 3.0, 2.0, 1.0]]), DILATION)
    c = torch.zeros(12, 1)
    c[0] = 100.0  # silu is the identity that far out

    out = conv(torch.zeros(12, 1), c, Carried(conv.new_state(1), ints(0), ints(0, 12)))

    assert out.flatten().tolist() == [100, 0, 0, 200, 0, 0, 300, 0, 0, 400, 0, 0]


def test_the_torch_path_can_be_chosen(fresh, monkeypatch):
    """The operator's override runs the reference; output and state agree."""
    weight, u, c = randn(fresh, 32, 1, TAPS), randn(fresh, 12, 32), randn(fresh, 12, 32)
    fast, slow = (Carried(torch.ones(2, HISTORY, 32), ints(1, -1), ints(0, 8, 10)) for _ in "ab")
    expected = Conv(weight, DILATION)(u, c, fast)
    monkeypatch.setenv("STALLWATCH_KERNEL_PLE_CONV", "torch")

    plain = Conv(weight, DILATION)

    assert plain.choice.impl == "torch"
    assert torch.allclose(plain(u, c, slow), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(slow.state, fast.state)


def test_warm_up_leaves_nothing_to_compile(fresh):
    """After the tasks of both dtypes, calls of other shapes compile nothing."""
    specs = [PleConvSpec(64, TAPS, DILATION, dtype) for dtype in DTYPES]
    warmup.run(warmup.tasks(specs, warmup.Shapes()))
    before = jit.signatures()

    for dtype in DTYPES:
        conv = Conv(randn(fresh, 40, 3), 2)
        rows = randn(fresh, 7, 40, dtype=dtype)
        conv(rows, rows.clone(), Carried(conv.new_state(2, dtype), ints(0, 1), ints(0, 3, 6)))

    assert warmup.grown(before, jit.signatures()) == {}


ROWS, STATE = torch.zeros(4, 8), torch.zeros(2, HISTORY, 8)
GOOD = Carried(STATE, ints(0, 1), ints(0, 2, 4))
BAD_CALLS = {
    "c of another type": (BadDtype, "c", {"c": ROWS.bfloat16()}),
    "c of other rows": (BadShape, "c", {"c": torch.zeros(3, 8)}),
    "u of another width": (BadShape, "u", {"u": torch.zeros(4, 7), "out": torch.zeros(4, 8)}),
    "columns apart": (BadLayout, "c", {"c": torch.zeros(4, 16)[:, ::2]}),
    "out is c": (BadLayout, "out", {"out": ROWS, "c": ROWS}),
    "state of another type": (BadDtype, "state", {"carried": replace(GOOD, state=STATE.half())}),
    "state of another length": (
        BadShape,
        "state",
        {"carried": replace(GOOD, state=torch.zeros(2, 8, 8))},
    ),
    "a state with gaps": (
        BadLayout,
        "state",
        {"carried": replace(GOOD, state=torch.zeros(2, HISTORY, 16)[..., ::2])},
    ),
    "slots of another type": (
        BadDtype,
        "slots",
        {"carried": replace(GOOD, slots=GOOD.slots.long())},
    ),
    "too few slots": (BadShape, "slots", {"carried": replace(GOOD, slots=ints(0))}),
    "a slot beyond the state": (BadIndex, "slots[1]", {"carried": replace(GOOD, slots=ints(0, 2))}),
    "a negative slot": (BadIndex, "slots[0]", {"carried": replace(GOOD, slots=ints(-2, 0))}),
    "a slot taken twice": (BadMetadata, "slots[1]", {"carried": replace(GOOD, slots=ints(1, 1))}),
    "offsets past the rows": (
        BadMetadata,
        "query_start_loc",
        {"carried": replace(GOOD, query_start_loc=ints(0, 2, 5))},
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_input_is_refused_by_name(name):
    """Each contradiction raises its own error, names the argument and leaves the state alone."""
    error, argument, change = BAD_CALLS[name]
    given = {"u": ROWS, "c": torch.zeros(4, 8), "carried": GOOD}

    with pytest.raises(error) as refusal:
        Conv(torch.ones(8, TAPS), DILATION)(**{**given, **change})

    assert refusal.value.argument == argument
    assert not STATE.any()


def test_a_bad_weight_is_refused():
    """A weight has channels and taps, and a dilation is positive."""
    with pytest.raises(BadShape, match="weight"):
        Conv(torch.ones(8), DILATION)
    with pytest.raises(BadMetadata, match="dilation"):
        Conv(torch.ones(8, TAPS), 0)


def test_bound_buffers_are_read_anew_at_every_call(fresh):
    """A bound convolution takes offsets and slots as they are now, and touches no more rows than asked."""
    conv = Conv(randn(fresh, 24, TAPS), DILATION)
    u, c = randn(fresh, 8, 24), randn(fresh, 8, 24)
    state, out = conv.new_state(3), torch.full((8, 24), 7.0)
    carried = Carried(state, ints(-1, -1, -1), ints(0, 0, 0, 0))
    bound = conv.bind(u, c, carried, out)
    alone = Carried(conv.new_state(3), ints(2, 0), ints(0, 4, 5))
    expected = conv(u[:5], c[:5], alone)

    carried.slots[:2] = alone.slots
    carried.query_start_loc[:3] = alone.query_start_loc
    bound(2, 6)

    assert torch.equal(out[:5], expected)
    assert not out[5].any()
    assert (out[6:] == 7.0).all()
    assert torch.equal(state, alone.state)
    for requests, rows in ((4, 6), (2, 9), (-1, 6)):
        with pytest.raises(BadMetadata, match="requests"):
            bound(requests, rows)
