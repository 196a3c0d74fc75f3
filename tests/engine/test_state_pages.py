"""Indices are lent to one holder at a time and come back when nothing refers to them."""

from __future__ import annotations

import pytest
import torch

from stallwatch_engine.state.pages import NULL, IndexPool, PageTables, PageWrite
from stallwatch_engine.state.quarantine import Lease, Quarantine


def test_each_index_has_one_holder():
    """All indices are handed out, each once; what came back first is reused first."""
    pool = IndexPool("pages", 4)
    taken = pool.take(4)

    assert sorted(taken) == [0, 1, 2, 3]
    assert pool.free == 0
    pool.give_back([2])
    pool.give_back([0])
    assert pool.take() == (2,)
    assert pool.take() == (0,)


def test_more_than_there_is():
    """Taking too many is an error and takes none."""
    pool = IndexPool("pages", 2)
    with pytest.raises(RuntimeError, match="3 pages asked for, 2 are free"):
        pool.take(3)
    assert pool.free == 2


@pytest.mark.parametrize("index", [0, 1, 7, NULL])
def test_double_return(index):
    """An index that is not out cannot come back: it would belong to two requests."""
    pool = IndexPool("slots", 2)
    pool.take()
    pool.give_back([0])
    with pytest.raises(RuntimeError, match="was not taken"):
        pool.give_back([index])
    assert pool.free == 2


def test_an_empty_pool():
    """A pool of nothing is refused when it is made."""
    with pytest.raises(ValueError, match="at least one"):
        IndexPool("slots", 0)


def test_quarantine_ends_with_the_last_reference():
    """A lease comes back with the last of the steps that refer to it, whichever retires last."""
    quarantine = Quarantine()
    first, second = Lease(0, (3, 4)), Lease(1, ())
    quarantine.hold(first, [5, 6])
    quarantine.hold(second, [6, 7])

    assert (quarantine.slots, quarantine.pages) == (2, 2)
    assert quarantine.retire(5) == ()
    assert quarantine.retire(6) == (first,)
    assert quarantine.retire(7) == (second,)
    assert (quarantine.slots, quarantine.pages) == (0, 0)


def test_quarantine_refuses_nonsense():
    """No reference, or the same lease twice, is a defect of the caller."""
    quarantine = Quarantine()
    with pytest.raises(ValueError, match="needs no quarantine"):
        quarantine.hold(Lease(0, ()), [])
    quarantine.hold(Lease(0, ()), [1])
    with pytest.raises(RuntimeError, match="in quarantine already"):
        quarantine.hold(Lease(0, ()), [2])


def test_tables_by_slot():
    """Entries land in their slot's row; clearing forgets one slot; the null slot's row stays null."""
    tables = PageTables(2, 3)
    tables.apply([PageWrite(0, 0, 9), PageWrite(1, 0, 4), PageWrite(1, 1, 0)])
    out = torch.empty(3, 3, dtype=torch.int32)

    tables.rows(torch.tensor([1, NULL, 0]), out)
    assert out.tolist() == [[4, 0, NULL], [NULL] * 3, [9, NULL, NULL]]
    tables.clear([1])
    tables.apply([])
    tables.rows(torch.tensor([1, 1, 0]), out)
    assert out.tolist() == [[NULL] * 3, [NULL] * 3, [9, NULL, NULL]]
