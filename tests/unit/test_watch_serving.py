"""While serving: compilers at work and large batches are no stalls, for a bounded time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stallwatch.board.image import LaneClass
from stallwatch.testing.snapshots import T0, facts, frame, lane, ns, process, snapshot
from stallwatch.watch.finding import Level, Rule
from stallwatch.watch.memory import Memory, remember
from stallwatch.watch.policy import MOST_COMPILE, MOST_SCALE, TOKENS_PER_LIMIT, Policy
from stallwatch.watch.rules import evaluate
from stallwatch.watch.snapshot import Recall, Snapshot

POLICY = Policy()


def over(snap: Snapshot) -> set[Rule]:
    found = evaluate(snap, snap.now_ns, POLICY)
    return {f.rule for f in found if f.level is Level.OVER}


def compiling(age: float, *, seen_ago: float, cls=LaneClass.WORK, pid: int = 100) -> Snapshot:
    """A lane in its phase for `age` s; compilers of `pid` were last seen at work `seen_ago` s ago."""
    name = "wait_worker" if cls is LaneClass.WAIT else "execute_model"
    recall = Recall(steps=99, compiled_ns={pid: ns(T0 + age - seen_ago)}, stuck_since_ns=ns(T0))
    lanes = [lane("model", frame(name, cls, at=T0), wait_on="worker:1/model")]
    return snapshot(T0 + age, lanes, processes=[process(pending=1)], recall=recall)


def test_a_compile_in_serving_extends_a_phase_and_pending_work():
    """Twice the limit is over, but compilers burnt CPU a second ago: nothing is late."""
    assert over(compiling(130, seen_ago=1)) == set()
    assert over(compiling(130, seen_ago=125)) >= {Rule.PHASE_OVER_LIMIT}


def test_it_does_not_extend_for_ever():
    """Ten limits are the most that compilers may buy."""
    late = 60 * MOST_COMPILE + 1
    assert Rule.PHASE_OVER_LIMIT in over(compiling(late, seen_ago=0))
    assert Rule.NO_PROGRESS in over(compiling(2 * late, seen_ago=0))


def test_a_rank_that_compiles_excuses_its_peers():
    """The others of its role wait for it in the step, whatever their phase is called."""
    snap = compiling(70, seen_ago=1, pid=200)
    for role, late in (("worker", False), ("offload", True)):
        peers = [process(pending=1), process(role, rank=1, pid=200)]
        image = replace(snap.image, processes=tuple(peers))
        assert (Rule.PHASE_OVER_LIMIT in over(replace(snap, image=image))) is late


def test_another_process_compilers_help_only_those_that_wait():
    """Compilers of pid 200 excuse a lane that waits, not one that works in pid 100."""
    assert Rule.PHASE_OVER_LIMIT in over(compiling(70, seen_ago=1, pid=200))
    waits = compiling(70, seen_ago=1, pid=200, cls=LaneClass.WAIT)
    assert Rule.PHASE_OVER_LIMIT not in over(waits)


@pytest.mark.parametrize(("ticks", "seen"), [(60, True), (20, False)])
@pytest.mark.parametrize("attached", [True, False])
def test_what_counts_as_a_compiler_is_a_helper_without_lanes_that_burns_cpu(ticks, seen, attached):
    """Half a second of CPU in five; a process that attached is no helper."""
    known = [process(), *([process(rank=1, pid=300)] if attached else [])]
    memory, last = Memory(), None
    for at, used in ((T0, 0), (T0 + 1, ticks)):
        procs = [facts(100), facts(300, ppid=100, cpu_ticks=used)]
        look = snapshot(at, [lane("model", frame(at=T0))], processes=known, procs=procs)
        memory, last = remember(memory, look, POLICY)
    assert (last.recall.compiled_ns.get(100) == ns(T0 + 1)) is (seen and not attached)


@pytest.mark.parametrize(
    ("tokens", "factor"),
    [(0, 1), (TOKENS_PER_LIMIT, 1), (4 * TOKENS_PER_LIMIT, 4), (1 << 60, MOST_SCALE), (-5, 1)],
)
def test_a_limit_grows_with_the_batched_tokens(tokens, factor):
    """In proportion above 8192 tokens, sixteen times at most: the number is the worker's word."""
    limit = 120 * factor
    for age, late in ((limit - 1, False), (limit + 1, True)):
        one = lane("model", frame("prefill", at=T0), details=(("tokens", tokens),))
        snap = snapshot(T0 + age, [one], recall=Recall(steps=99))
        assert (Rule.PHASE_OVER_LIMIT in over(snap)) is late


def test_an_outer_phase_is_not_scaled():
    """Details belong to the innermost phase."""
    stack = (frame("outer", at=T0), frame("prefill", at=T0 + 55))
    one = replace(lane("model", *stack), details=(("tokens", 1 << 40),))
    assert Rule.PHASE_OVER_LIMIT in over(snapshot(T0 + 61, [one], recall=Recall(steps=99)))
