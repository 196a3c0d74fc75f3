"""Every op at every number of rows: 1, 7, 8, 9, 49, 64, 185, 4096 against float64; 1, 2, 3, 4, 8 bit for bit."""

from __future__ import annotations

import random

import pytest
import torch

from judge import judged
from kernel_ops import OPS, Draw, doubled, linear
from stallwatch_kernels.pool import RowPool

ROWS = [1, 7, 8, 9, 49, 64, 185, 4096]
FEW = [1, 2, 3, 4, 8]
INVARIANT = [(op, torch.float32) for op in OPS]
# torch's matrix unit takes bfloat16 linear layers beyond four rows, and promises no bits
INVARIANT += [(op, torch.bfloat16) for op in OPS if op is not linear]


@pytest.fixture
def draw() -> Draw:
    """Normal numbers that differ from run to run and come back with its seed (-p randomly)."""
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    return lambda *shape: torch.randn(*shape, generator=generator)


@pytest.fixture
def pool():
    """Two threads."""
    threads = RowPool(2)
    yield threads
    threads.close()


@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("make", OPS, ids=lambda op: op.__name__)
def test_every_number_of_rows_equals_float64(make, rows: int, draw: Draw) -> None:
    """In float32, relative L2 at most 1e-6 over all rows together."""
    op = make(rows, torch.float32, draw)

    judged(op.of(rows), op.exact(*(doubled(x) for x in op.inputs)))


@pytest.mark.slow
@pytest.mark.parametrize(("make", "dtype"), INVARIANT)
def test_a_row_has_the_same_bits_in_every_batch(make, dtype: torch.dtype, draw: Draw) -> None:
    """Rows of batches of 1, 2, 3, 4 and 8 are bit for bit those of a batch of 16."""
    op = make(16, dtype, draw)
    whole = op.of(16)
    for rows in FEW:
        assert torch.equal(op.of(rows), whole[:rows])


@pytest.mark.slow
@pytest.mark.parametrize("make", OPS, ids=lambda op: op.__name__)
def test_two_threads_give_the_bits_of_one(make, draw: Draw, pool: RowPool) -> None:
    """Whether cut over rows, columns, channels or heads, a cut shows nowhere."""
    drawn: list[torch.Tensor] = []

    def kept(*shape: int) -> torch.Tensor:
        drawn.append(draw(*shape))
        return drawn[-1]

    op = make(1500, torch.float32, kept)
    again = iter(drawn)
    threaded = make(1500, torch.float32, lambda *_: next(again), pool)

    assert torch.equal(threaded.of(1500), op.of(1500))


@pytest.mark.slow
@pytest.mark.parametrize("make", OPS, ids=lambda op: op.__name__)
def test_no_rows_give_no_rows(make, draw: Draw) -> None:
    """An empty batch has an empty result."""
    assert len(make(4, torch.float32, draw).of(0)) == 0
