"""The same stall again."""

from __future__ import annotations

from stallwatch.lifecycle.repeats import KEPT, WINDOW_NS, Repeats, Seen


def test_the_same_kind_and_culprit_within_a_day_is_a_repeat():
    """Another kind, another culprit, an older one or a nameless one is none."""
    told = Repeats().told(Seen(0, "GIL_HELD", "worker:0/model", "st-1"))
    assert [s.id for s in told.before("GIL_HELD", "worker:0/model", WINDOW_NS)] == ["st-1"]
    assert not told.before("GIL_HELD", "worker:1/model", 5)
    assert not told.before("CPU_RUNAWAY", "worker:0/model", 5)
    assert not told.before("GIL_HELD", "worker:0/model", WINDOW_NS + 1)
    assert not told.told(Seen(1, "GIL_HELD", "", "st-2")).before("GIL_HELD", "", 2)


def test_memory_is_bounded():
    """Old ones are forgotten, and there are never more than some hundreds."""
    told = Repeats()
    for n in range(2 * KEPT):
        told = told.told(Seen(n, "GIL_HELD", f"worker:{n}", f"st-{n}"))
    assert len(told.seen) == KEPT
    assert len(told.told(Seen(2 * WINDOW_NS, "GIL_HELD", "x", "st-x")).seen) == 1
