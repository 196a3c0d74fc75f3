"""Who ended first: a child that follows its parent is a consequence, a child that was killed is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stallwatch.board.image import LaneClass
from stallwatch.diagnosis.classify import diagnose
from stallwatch.diagnosis.kinds import Kind
from stallwatch.diagnosis.verdict import Case, Verdict
from stallwatch.testing.cases import Build, Member, finding
from stallwatch.watch.finding import Rule, Subject


def family() -> tuple[Build, Member, Member, Member]:
    """api:0, its child worker:0, and offload:0, a child of the worker's."""
    build = Build()
    api = build.member(10, "api")
    worker = build.member(30, "worker")
    offload = build.member(40, "offload")
    build.lane(worker, "scheduler", "launch_step", age=0.1)
    build.lane(offload, "serve", "lookup", age=0.1)
    return build, api, worker, offload


def gone(build: Build, member: Member) -> Case:
    """The finding that this process ended."""
    name = f"{member.role}:{member.rank}"
    subject = Subject(name, member.role, member.rank, member.pid, member.ticks)
    return build.case(finding(Rule.PROCESS_GONE, subject, elapsed_s=0.1, limit_s=0))


def accused(verdict: Verdict) -> tuple[str, int]:
    assert verdict.kind is Kind.CHILD_DIED, verdict
    return verdict.culprit.process, verdict.culprit.pid


@pytest.mark.parametrize("end", [{"signal": 9}, {"status": 1}, {}])
def test_a_child_that_followed_its_killed_parent_is_no_culprit(end: dict[str, int]) -> None:
    """The child's end was seen a look before that of its killed parent, whatever it ended with."""
    build, api, worker, offload = family()
    build.exit(offload, at_s=0.0, ppid=worker.pid, **end)
    build.exit(worker, at_s=0.1, ppid=api.pid, signal=9)
    verdict = diagnose(gone(build, offload))
    assert (accused(verdict), verdict.confidence) == (("worker:0", 30), "high")
    assert "ended with signal 9 while in launch_step" in verdict.summary
    told = "offload:0 followed it" if end.get("signal") else "before any other"
    assert any(told in r for r in verdict.reasons), verdict.reasons


def test_a_parent_that_is_a_zombie_ended_before_its_child() -> None:
    """Its last threads are still ending, so nothing says how it ended: the parent, medium."""
    build, _, worker, offload = family()
    worker.state = "Z"
    build.exit(offload, ppid=worker.pid, signal=9)
    verdict = diagnose(gone(build, offload))
    assert (accused(verdict), verdict.confidence) == (("worker:0", 30), "medium")
    assert "its exit status is not known" in verdict.summary


@pytest.mark.parametrize(
    ("state", "first"), [("R", ("worker:0", 30)), ("Z", ("worker:0", 30)), ("S", ("offload:0", 40))]
)
def test_a_later_look_tells_how_the_parent_ended(state: str, first: tuple[str, int]) -> None:
    """The child is gone, and at the third look so is its killed parent, unless that still slept."""
    build, api, worker, offload = family()
    worker.state = state
    build.exit(offload, at_s=0.9, ppid=worker.pid, signal=9)
    case = gone(build, offload)
    build.exit(worker, at_s=1.0, ppid=api.pid, signal=9)
    case = replace(case, after=replace(case.snapshot, exits=tuple(build.exits)))
    verdict = diagnose(case)
    assert (accused(verdict), verdict.confidence) == (first, "high")


def test_our_own_kill_of_the_parent_makes_the_child_no_follower() -> None:
    """The child was killed, then our kill of the tree ended its parent: the child is the culprit."""
    build, api, worker, offload = family()
    build.exit(offload, at_s=0.0, ppid=worker.pid, signal=9)
    build.exit(worker, at_s=0.1, ppid=api.pid, signal=9, expected=True)
    build.exit(api, at_s=0.1, signal=9, expected=True)
    verdict = diagnose(gone(build, offload))
    assert (accused(verdict), verdict.confidence) == (("offload:0", 40), "high")


def test_a_child_that_our_own_kill_ended_is_no_culprit() -> None:
    """The worker died of itself; its child went with our kill of the tree, or first of all seen."""
    build, api, worker, offload = family()
    build.exit(offload, at_s=0.0, ppid=worker.pid, signal=9, expected=True)
    build.exit(worker, at_s=0.1, ppid=api.pid, signal=6)
    assert accused(diagnose(gone(build, worker))) == ("worker:0", 30)


@pytest.mark.parametrize("after_s", [0.0, 0.1])
def test_a_child_killed_before_its_parent_ended_by_itself_is_the_culprit(after_s: float) -> None:
    """Its parent gave up with a status of its own: the child, but the two are too close for certainty."""
    build, api, worker, offload = family()
    build.exit(worker, at_s=after_s, ppid=api.pid, status=1)
    build.exit(offload, at_s=0.0, ppid=worker.pid, signal=9)
    verdict = diagnose(gone(build, offload))
    assert (accused(verdict), verdict.confidence) == (("offload:0", 40), "medium")
    assert any("worker:0, its parent, ended with exit status 1" in r for r in verdict.reasons)


def test_a_child_killed_long_before_its_parent_gave_up_is_certain() -> None:
    """A second apart, the order is beyond doubt."""
    build, api, worker, offload = family()
    build.exit(offload, at_s=0.0, ppid=worker.pid, signal=9)
    build.exit(worker, at_s=1.0, ppid=api.pid, status=1)
    verdict = diagnose(gone(build, offload))
    assert (accused(verdict), verdict.confidence) == (("offload:0", 40), "high")


def test_a_child_that_crashed_followed_nobody() -> None:
    """A segmentation fault is no way of following: the child is named though its parent was killed."""
    build, api, worker, offload = family()
    build.exit(offload, at_s=0.0, ppid=worker.pid, signal=11)
    build.exit(worker, at_s=0.1, ppid=api.pid, signal=9)
    assert accused(diagnose(gone(build, offload))) == ("offload:0", 40)


def test_a_whole_line_of_descent_leads_to_its_oldest() -> None:
    """Killed from the top: grandchild, child and root, seen in the wrong order: the root."""
    build, api, worker, offload = family()
    build.exit(offload, at_s=0.0, ppid=worker.pid, signal=9)
    build.exit(worker, at_s=0.05, ppid=api.pid, signal=9)
    build.exit(api, at_s=0.1, signal=9)
    assert accused(diagnose(gone(build, offload))) == ("api:0", 10)


def test_parents_in_a_circle_end_the_search() -> None:
    """Reused pids may name each other as parents: somebody is named, and the search ends."""
    build, _, worker, offload = family()
    build.exit(offload, at_s=0.0, ppid=worker.pid, signal=9)
    build.exit(worker, at_s=0.1, ppid=offload.pid, signal=9)
    assert diagnose(gone(build, offload)).kind is Kind.CHILD_DIED


def test_a_wait_for_two_dead_processes_accuses_the_parent() -> None:
    """No exit is known yet and both are zombies: the chain ends at the child, its parent is named."""
    build, api, worker, offload = family()
    worker.state = offload.state = "Z"
    offload.ppid = worker.pid
    wait = LaneClass.WAIT
    loop = build.lane(api, "loop", "wait_worker", cls=wait, on="worker:0/rows")
    build.lane(worker, "rows", "wait_rows", cls=wait, on="offload:0/serve")
    verdict = diagnose(build.case(build.late(loop)))
    assert accused(verdict) == ("worker:0", 30)
