"""What a process used between two looks."""

from __future__ import annotations

from stallwatch.testing.snapshots import T0, facts, snapshot
from stallwatch.watch.usage import Usage, usage


def test_differences_of_one_process():
    """CPU, faults and bytes are subtracted; a number that one look lacks stays unknown."""
    before = snapshot(T0, procs=[facts(100, cpu_ticks=5, major_faults=2, read_bytes=10)])
    after = snapshot(
        T0 + 2,
        procs=[
            facts(100, cpu_ticks=9, minor_faults=7, major_faults=40, read_bytes=30, written_bytes=1)
        ],
    )
    assert usage(before, after, 100) == Usage(2.0, 4, 7, 38, 20, None)


def test_another_process_with_the_same_pid_has_no_difference():
    """A reused pid, a process that is gone, and looks in the wrong order: nothing is claimed."""
    before = snapshot(T0, procs=[facts(100)])
    reused = snapshot(T0 + 1, procs=[facts(100, start_ticks=77)])
    assert usage(before, reused, 100) is None
    assert usage(before, snapshot(T0 + 1, procs=[]), 100) is None
    assert usage(before, before, 100) is None
