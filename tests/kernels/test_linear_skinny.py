"""Skinny linear: right against float64, the same bits for a row in any batch, refusals by name."""

from __future__ import annotations

import pytest
import torch

from stallwatch_kernels import jit
from stallwatch_kernels.admission import choose
from stallwatch_kernels.errors import BadDtype, BadLayout, BadShape
from stallwatch_kernels.linear.skinny import SKINNY_BF16_ROWS, Linear, LinearSpec, candidates, tasks
from stallwatch_kernels.pool import RowPool
from stallwatch_kernels.warmup import Shapes

# K: vectors only, a remainder, less than one vector; N: strips of four and one to three columns left over
SHAPES = [(64, 32), (96, 100), (103, 37), (5, 2560), (2, 7), (257, 640)]
ROWS = [1, 2, 3, 4, 5, 8, 16, 17, 49, 64]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile first, so that no test carries it."""
    for task in tasks(LinearSpec(8, 8, torch.float32), Shapes()):
        task.run()


def gaussian(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def error(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    """Relative L2 against float64 on the weights as stored."""
    expected = x.double() @ weight.double().T
    return float((got.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_float32_is_right(outputs: int, inputs: int, rows: int) -> None:
    """Relative L2 against float64 stays under 1e-6 at every number of rows."""
    weight, x = gaussian(outputs, inputs, seed=1), gaussian(rows, inputs, seed=2)

    assert error(Linear(weight)(x), x, weight) < 1e-6


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_row_has_the_same_bits_in_every_batch(outputs: int, inputs: int) -> None:
    """Row i of a batch of 1, 2, 3, 4, 8, 16 or 17 is bit for bit row i of a batch of 64."""
    linear = Linear(gaussian(outputs, inputs, seed=3))
    x = gaussian(64, inputs, seed=4)
    whole = linear(x)
    for rows in (1, 2, 3, 4, 8, 16, 17):
        for first in (0, 5, 47):
            part = linear(x[first : first + rows])

            assert torch.equal(part, whole[first : first + rows])


def test_bf16_weights_have_the_same_bits_in_every_batch_of_float32_rows() -> None:
    """bfloat16 weights read directly or decoded first give float32 rows the same bits."""
    linear = Linear(gaussian(103, 100, seed=5).bfloat16())
    x = gaussian(64, 100, seed=6)
    whole = linear(x)

    assert error(whole, x, linear.weight) < 1e-6
    for rows in (1, 2, 3, 4, 8, 16, 17):
        assert torch.equal(linear(x[:rows]), whole[:rows])


@pytest.mark.parametrize("rows", ROWS)
def test_bf16_is_rounded_once(rows: int) -> None:
    """At most 1 % of elements differ from the rounded float64 result, and those by one unit."""
    weight = gaussian(512, 640, seed=7).bfloat16()
    x = gaussian(rows, 640, seed=8).bfloat16()
    expected = (x.double() @ weight.double().T).bfloat16()

    got = Linear(weight)(x)

    steps = (ordered(got) - ordered(expected)).abs()
    assert got.dtype == torch.bfloat16
    assert int(steps.max()) <= 1
    assert float((steps > 0).double().mean()) <= 0.01


def ordered(values: torch.Tensor) -> torch.Tensor:
    """bfloat16 as integers in the order of the values: neighbours differ by 1."""
    bits = values.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def test_bias_out_and_strided_weight() -> None:
    """A bias is added after the sum, `out` is filled and returned, rows of a wider weight may be a view."""
    wide = gaussian(40, 96, seed=9)
    weight, bias = wide[:, 16:80], gaussian(40, seed=10)
    x, out = gaussian(3, 64, seed=11), torch.full((3, 40), float("nan"))
    linear = Linear(weight, bias)

    assert linear(x, out) is out
    assert torch.equal(out, Linear(weight.contiguous())(x) + bias)
    assert linear(x[:0]).shape == (0, 40)


def test_threads_change_no_bit() -> None:
    """Cut over three threads, wherever the cuts fall, the result is the same."""
    weight, x = gaussian(403, 65, seed=12), gaussian(6, 65, seed=13)
    pool = RowPool(3)
    try:
        assert torch.equal(Linear(weight, pool=pool)(x), Linear(weight)(x))
    finally:
        pool.close()


def test_neighbours_are_not_touched() -> None:
    """The kernel writes its own outputs alone and reads no NaN that lies behind the last element of a row."""
    store = torch.full((7 * 37 + 64,), float("nan"))
    weight = store[: 7 * 37].view(7, 37)
    weight.copy_(gaussian(7, 37, seed=14))
    around = torch.full((4, 7), 5.0)

    Linear(weight)(gaussian(2, 37, seed=15), around[1:3])

    assert bool(torch.isfinite(around).all())
    assert bool((around[0] == 5.0).all())
    assert bool((around[3] == 5.0).all())


@pytest.mark.parametrize("rows", [2, 5, 20])
def test_a_nan_stays_in_its_row(rows: int) -> None:
    """A row of NaN changes no other row, although K ends inside a vector that reaches into the next row."""
    linear = Linear(gaussian(9, 37, seed=26))
    x = gaussian(rows, 37, seed=27)
    clean = linear(x)
    x[1] = float("nan")

    got = linear(x)

    assert bool(got[1].isnan().all())
    assert torch.equal(got[0], clean[0])
    assert torch.equal(got[2:], clean[2:])


def test_bad_input_is_refused_by_name() -> None:
    """Types, shapes and layouts that the kernel cannot take raise before `out` changes."""
    linear = Linear(gaussian(8, 32, seed=16))
    out = torch.full((2, 8), 7.0)
    x = gaussian(2, 32, seed=17)
    with pytest.raises(BadShape, match=r"\[M, 32\]"):
        linear(gaussian(2, 31, seed=18), out)
    with pytest.raises(BadDtype, match="float16"):
        linear(x.half(), out)
    with pytest.raises(BadShape, match="out"):
        linear(x, torch.empty(3, 8))
    with pytest.raises(BadLayout, match="out"):
        linear(x, torch.empty(8, 2).T)
    with pytest.raises(BadLayout, match="strides"):
        Linear(gaussian(32, 8, seed=19).T)
    with pytest.raises(BadDtype, match="float16"):
        Linear(gaussian(8, 32, seed=20).half())
    with pytest.raises(BadShape, match="bias"):
        Linear(gaussian(8, 32, seed=21), torch.zeros(7))
    assert bool((out == 7.0).all())


def test_admission_names_the_kernel_and_why() -> None:
    """float32 always takes the skinny kernel, bfloat16 up to its crossing; the reason says which."""

    def chosen(**changes: object) -> str:
        spec = LinearSpec(**{"inputs": 8, "outputs": 8, "dtype": torch.float32, **changes})
        return choose("linear", candidates(spec), environ={}).impl

    assert chosen(rows=4096) == "skinny"
    assert chosen(dtype=torch.bfloat16, rows=SKINNY_BF16_ROWS) == "skinny"
    assert chosen(dtype=torch.bfloat16, rows=SKINNY_BF16_ROWS + 1) == "torch"
    assert chosen(device="cuda") == "torch"


def test_torch_path_gives_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The override runs torch instead, and both agree to rounding."""
    weight, x = gaussian(32, 64, seed=22), gaussian(5, 64, seed=23)
    ours = Linear(weight)(x)
    monkeypatch.setenv("STALLWATCH_KERNEL_LINEAR", "torch")
    theirs = Linear(weight)

    assert theirs.few.impl == theirs.many.impl == "torch"
    torch.testing.assert_close(theirs(x), ours, rtol=1e-5, atol=1e-5)


def test_nothing_is_compiled_after_warm_up() -> None:
    """A served call of any shape finds every signature present."""
    for dtype in (torch.float32, torch.bfloat16):
        for task in tasks(LinearSpec(8, 8, dtype), Shapes()):
            task.run()
    before = jit.signatures()
    for rows in (1, 3, 20):
        Linear(gaussian(9, 50, seed=24))(gaussian(rows, 50, seed=25))
        Linear(gaussian(9, 50, seed=24).bfloat16())(gaussian(rows, 50, seed=25).bfloat16())

    assert jit.signatures() == before
