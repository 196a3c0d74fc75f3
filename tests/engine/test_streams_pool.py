"""Events are borrowed from a pool that never waits and never lends one that somebody may wait for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallwatch_engine.streams.errors import OverContract
from stallwatch_engine.streams.pool import MAX_ABANDONED, EventPool
from stallwatch_engine.streams.threaded import ThreadedEvent


def test_one_event_too_many_raises_and_says_what_the_contract_is():
    """Blocking there would hide who holds the events."""
    pool = EventPool(ThreadedEvent, 2)
    pool.take(), pool.take()
    with pytest.raises(OverContract, match="2 at a time"):
        pool.take()


def test_an_event_comes_back_when_its_last_holder_releases_it():
    """Two wait for it: one release is not enough, a third is a defect."""
    pool = EventPool(ThreadedEvent, 1)
    lease = pool.take().retain()
    lease.release()
    assert pool.free == 0
    lease.release()
    assert pool.free == 1
    with pytest.raises(RuntimeError, match="went back"):
        lease.release()
    with pytest.raises(RuntimeError, match="went back"):
        lease.retain()


def test_an_abandoned_event_is_replaced_by_another_a_bounded_number_of_times():
    """It may still complete, so nobody gets it again; a device that completes nothing ends the pool."""
    pool = EventPool(ThreadedEvent, 1)
    seen = []
    for _ in range(MAX_ABANDONED + 1):
        lease = pool.take()
        assert not any(lease.event is other for other in seen)
        seen.append(lease.event)
        lease.abandon()
    with pytest.raises(OverContract):
        pool.take()


@given(st.lists(st.sampled_from(["take", "retain", "release", "abandon"]), max_size=60))
def test_no_event_is_ever_lent_twice(moves):
    """Over any sequence of borrowing and giving back."""
    pool, out = EventPool(ThreadedEvent, 3), []
    for move in moves:
        if move == "take":
            try:
                lease = pool.take()
            except OverContract:
                assert len(out) == 3 or pool.free == 0
                continue
            assert not any(lease.event is other.event for other, _ in out)
            out.append((lease, 1))
        elif out:
            lease, holders = out.pop(0)
            getattr(lease, move)()
            holders += {"retain": 1, "release": -1, "abandon": -holders}[move]
            if holders:
                out.append((lease, holders))
    assert pool.free + len(out) == 3 or pool._abandoned > MAX_ABANDONED


def test_an_empty_pool_is_refused():
    """A pool of no events could only raise."""
    with pytest.raises(ValueError, match="at least one"):
        EventPool(ThreadedEvent, 0)
