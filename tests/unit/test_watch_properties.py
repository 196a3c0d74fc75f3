"""Properties of the rules over arbitrary snapshots."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallwatch.board.image import (
    BoardImage,
    LaneClass,
    LaneImage,
    PauseLease,
    PhaseFrame,
    ProcessImage,
)
from stallwatch.lifecycle.states import State
from stallwatch.watch.finding import Finding, Level, Rule
from stallwatch.watch.memory import Memory, remember
from stallwatch.watch.policy import Policy
from stallwatch.watch.rules import evaluate
from stallwatch.watch.snapshot import EngineFacts, Exit, HostFacts, ProcFacts, Recall, Snapshot
from stallwatch.watch.tracker import Tracker, moved, observe

pytestmark = pytest.mark.slow

times = st.integers(-(2**63), 2**63 - 1)
near = st.integers(0, 10**13)
some_time = st.one_of(near, times)
counts = st.integers(0, 2**64 - 1)
pids = st.integers(1, 6)
words = st.sampled_from(["", "loop", "compile", "execute_model", "worker:0/a", "core:0", "\x00é"])
frames = st.builds(PhaseFrame, words, st.sampled_from(LaneClass), some_time, some_time, some_time)
lanes = st.builds(
    LaneImage,
    slot=st.integers(0, 8),
    pid=pids,
    tid=pids,
    start_ticks=pids,
    role=st.sampled_from(["api", "core", "worker"]),
    rank=st.integers(0, 2),
    name=st.sampled_from(["a", "b"]),
    channel=st.booleans(),
    stack=st.lists(frames, min_size=1, max_size=4).map(tuple),
    beats=counts,
    work=counts,
    wait_on=words,
    torn=st.booleans(),
    closed=st.booleans(),
)
leases = st.builds(PauseLease, words, words, some_time, some_time)
processes = st.builds(
    ProcessImage,
    slot=pids,
    pid=pids,
    start_ticks=pids,
    role=st.sampled_from(["api", "core", "worker"]),
    rank=st.integers(0, 2),
    ready=st.booleans(),
    pending=st.integers(-5, 2**63),
    attached_ns=some_time,
    detached=st.booleans(),
    pause=st.none() | leases,
)
images = st.builds(
    BoardImage,
    st.just(1),
    some_time,
    st.lists(processes, max_size=4).map(tuple),
    st.lists(lanes, max_size=6).map(tuple),
    st.lists(words, max_size=2).map(tuple),
)
procs = st.builds(
    ProcFacts,
    pid=pids,
    start_ticks=pids,
    ppid=pids,
    comm=words,
    state=st.sampled_from("RSDTtZXI"),
    cpu_ticks=counts,
    child_ticks=counts,
    rss_pages=counts,
    threads=pids,
    tracer_pid=st.integers(0, 3),
    tids=st.none() | st.frozensets(pids),
)
exits = st.builds(
    Exit,
    pid=pids,
    start_ticks=pids,
    at_ns=some_time,
    root=st.booleans(),
    status=st.none() | pids,
    signal=st.none() | pids,
    expected=st.booleans(),
)
engines = st.builds(
    EngineFacts,
    name=st.just("chat"),
    incarnation=st.just(1),
    state=st.sampled_from(State),
    root_pid=pids,
    started_ns=some_time,
    ready_ns=st.none() | some_time,
    stop_asked_ns=st.none() | some_time,
    stop_grace_ns=some_time,
    side_progress_ns=some_time,
    pid_side_progress_ns=st.dictionaries(pids, some_time, max_size=3),
)
recalls = st.builds(
    Recall,
    steps=st.none() | st.integers(0, 10),
    stuck_since_ns=st.none() | some_time,
    stopped_since_ns=st.dictionaries(pids, some_time, max_size=3),
    traced_since_ns=st.dictionaries(pids, some_time, max_size=3),
    attached=st.dictionaries(pids, processes, max_size=3),
    excused=st.dictionaries(
        st.integers(0, 8), st.lists(st.tuples(near, near), max_size=3).map(tuple), max_size=3
    ),
)
hosts = st.builds(
    HostFacts, st.integers(0, 10**10), st.none() | counts, st.booleans(), st.none() | counts
)
snapshots = st.builds(
    Snapshot,
    now_ns=near,
    engine=engines,
    image=st.none() | images,
    processes=st.lists(procs, max_size=5).map(lambda ps: {p.pid: p for p in ps}),
    exits=st.lists(exits, max_size=3).map(tuple),
    host=hosts,
    recall=recalls,
)
policies = st.sampled_from(
    [Policy(), Policy(compile_steps=0, default_ns=10**9), Policy(no_progress_ns=0, start_ns=1)]
)


def _whole(finding: Finding) -> bool:
    numbers = (finding.since_ns, finding.elapsed_ns, finding.limit_ns)
    return all(type(n) is int for n in numbers) and finding.elapsed_ns >= 0


@given(snapshots, policies)
@settings()
def test_the_rules_are_total_and_speak_in_whole_numbers(snap, policy):
    """No snapshot makes the rules raise, and every finding has integer times and a unique key or lane."""
    found = evaluate(snap, snap.now_ns, policy)
    assert all(_whole(f) and f.key and f.fingerprint for f in found)


@given(snapshots, policies, st.integers(0, 10**13))
@settings()
def test_more_elapsed_time_never_removes_or_softens_a_finding(snap, policy, more):
    """On one snapshot a later now keeps every finding and never turns OVER into WARN."""
    now = {
        (f.key, f.subject, i): f.level for i, f in _numbered(evaluate(snap, snap.now_ns, policy))
    }
    later = {
        (f.key, f.subject, i): f.level
        for i, f in _numbered(evaluate(snap, snap.now_ns + more, policy))
    }
    for key, level in now.items():
        assert key in later
        assert level is Level.WARN or later[key] is Level.OVER


def _numbered(found):
    """Hostile boards may hold two lanes of one slot: number equal keys."""
    seen: dict = {}
    for finding in found:
        index = seen.get((finding.key, finding.subject), 0)
        seen[finding.key, finding.subject] = index + 1
        yield index, finding


@given(snapshots, policies)
@settings()
def test_idle_lanes_with_nothing_pending_never_make_a_finding(snap, policy):
    """Idle time never counts: no rule about lanes or work speaks of an idle, empty engine."""
    if snap.image is None:
        return
    idle = PhaseFrame("idle", LaneClass.IDLE, 0, 0, 1)
    image = replace(
        snap.image,
        lanes=tuple(replace(x, stack=(*x.stack[:3], idle)) for x in snap.image.lanes),
        processes=tuple(replace(p, pending=0, pause=None) for p in snap.image.processes),
    )
    rules = {f.rule for f in evaluate(replace(snap, image=image), snap.now_ns, policy)}
    assert not rules & {Rule.PHASE_OVER_LIMIT, Rule.NO_PROGRESS, Rule.THREAD_GONE}


@given(st.lists(snapshots, min_size=1, max_size=5), policies)
@settings()
def test_memory_and_tracker_are_total(looks, policy):
    """Any sequence of looks goes through memory, rules, tracker and the third look."""
    memory, tracker = Memory(), Tracker()
    for raw in looks:
        memory, snap = remember(memory, raw, policy)
        found = evaluate(snap, snap.now_ns, policy)
        tracker, _ = observe(tracker, found, snap, policy)
        assert all(moved(f, snap) in (True, False) for f in found)
        assert len(fields(tracker)) == 3
        assert len(tracker.stretches) <= len(found)


@given(snapshots, policies)
@settings()
def test_a_finding_has_not_moved_against_its_own_snapshot(snap, policy):
    """The third look and the rules compute the same fingerprint (unique, stable lanes)."""
    image = snap.image
    if image is not None:
        addresses = [(x.address, x.pid, x.tid) for x in image.lanes]
        owners = [p.pid for p in image.processes]
        if len(set(addresses)) < len(addresses) or len(set(owners)) < len(owners):
            return
    for finding in evaluate(snap, snap.now_ns, policy):
        assert not moved(finding, snap)
