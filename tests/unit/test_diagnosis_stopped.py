"""A stopped process is accused as a whole: no lane of it did anything."""

from __future__ import annotations

from stallwatch.board.image import LaneClass
from stallwatch.diagnosis.classify import diagnose
from stallwatch.diagnosis.kinds import Kind
from stallwatch.testing.cases import Build, finding, stack
from stallwatch.watch.finding import Rule, Subject


def test_a_stopped_process_is_accused_and_no_lane_of_it() -> None:
    """Found by its state, with a lane at work: the process, what it was in, and the frame of a stack."""
    build = Build()
    worker = build.member(30, "worker", state="T", stacks=(stack(30, "run_kernel"),))
    build.lane(worker, "model", "execute_model", age=1)
    subject = Subject("worker:0", "worker", 0, worker.pid, worker.ticks)
    verdict = diagnose(build.case(finding(Rule.PROCESS_STOPPED, subject, elapsed_s=0.7)))
    culprit = verdict.culprit
    assert verdict.kind is Kind.PROCESS_STOPPED
    assert (culprit.address, culprit.lane, culprit.phase) == ("worker:0", "", "execute_model")
    assert culprit.frame == "run_kernel (model.py:42)"


def test_a_stopped_process_that_a_wait_leads_to_is_accused_as_a_whole() -> None:
    """The wait names one lane, and the stop is of all: the process; the edge keeps the lane."""
    build = Build()
    core, worker = build.member(20, "core"), build.member(30, "worker", state="T")
    wait = build.lane(core, "main", "wait_worker", cls=LaneClass.WAIT, on="worker:0/model")
    build.lane(worker, "model", "execute_model")
    verdict = diagnose(build.case(build.late(wait)))
    assert (verdict.kind, verdict.culprit.address) == (Kind.PROCESS_STOPPED, "worker:0")
    assert verdict.edges[0].target == "worker:0/model"


def test_a_stopped_process_does_not_wait_for_itself() -> None:
    """The late lane is the stopped process's own, and waits for another: nobody waits for it."""
    build = Build()
    core, worker = build.member(20, "core", state="T"), build.member(30, "worker")
    wait = build.lane(core, "main", "wait_worker", cls=LaneClass.WAIT, on="worker:0/model")
    build.lane(worker, "model", "execute_model")
    verdict = diagnose(build.case(build.late(wait)))
    assert (verdict.kind, verdict.culprit.address) == (Kind.PROCESS_STOPPED, "core:0")
    assert "waits for it" not in verdict.summary


def test_any_stack_of_a_stopped_process_gives_its_frame() -> None:
    """Its lane's thread has no stack, another one has: that one's frame, and its name."""
    build = Build()
    worker = build.member(30, "worker", state="T", stacks=(stack(33, "poll", name="poller"),))
    build.lane(worker, "model", "execute_model", age=1)
    subject = Subject("worker:0", "worker", 0, worker.pid, worker.ticks)
    culprit = diagnose(build.case(finding(Rule.PROCESS_STOPPED, subject))).culprit
    assert (culprit.thread, culprit.frame) == ("poller", "poll (model.py:42)")
