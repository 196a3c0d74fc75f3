"""The committed board of the old shared-event mode is one that the diagnosis names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from heartbeat_helpers import look
from ple_cycle import CYCLE, FIXTURE
from stallwatch.board.reader import BoardReader
from stallwatch.diagnosis.classify import diagnose
from stallwatch.diagnosis.kinds import Kind
from stallwatch.testing.cases import NOW, Build
from stallwatch.watch.policy import S


@pytest.mark.parametrize("late", sorted(waiter for waiter, _ in CYCLE))
def test_whichever_of_the_three_is_late_the_verdict_is_the_circle(late):
    """ORDER_CYCLE with exactly the three edges: model -> offload -> ple-request -> model."""
    reader = BoardReader(FIXTURE)
    try:
        image = look(reader)
    finally:
        reader.close()
    build = Build()
    for one in image.processes:
        build.member(one.pid, one.role, one.rank)
    entered = NOW - 61 * S
    for (
        lane
    ) in image.lanes:  # as they were, but long enough ago, and in living processes of the builder
        frames = tuple(replace(f, entered_ns=entered, progress_ns=entered) for f in lane.stack)
        tid = 0 if lane.channel else lane.pid
        build.lanes.append(replace(lane, stack=frames, tid=tid, start_ticks=lane.pid * 10))

    subject = next(lane for lane in build.lanes if lane.address == late)
    verdict = diagnose(build.case(build.late(subject)))

    assert verdict.kind is Kind.ORDER_CYCLE
    assert {(edge.waiter, edge.target) for edge in verdict.edges} == CYCLE
