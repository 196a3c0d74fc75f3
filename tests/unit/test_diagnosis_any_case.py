"""Properties over arbitrary cases: total, honest, printable."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallwatch.board.image import LaneClass
from stallwatch.diagnosis import graph
from stallwatch.diagnosis.classify import diagnose, refine
from stallwatch.diagnosis.kinds import Kind
from stallwatch.diagnosis.verdict import Case, Verdict
from stallwatch.diagnosis.vocabulary import DEFAULT
from stallwatch.evidence.model import Frame, Rung, ThreadStack
from stallwatch.testing.cases import NOW, Build, finding
from stallwatch.watch.finding import Finding, Rule, Subject
from stallwatch.watch.snapshot import Recall

PHASES = [
    "",
    "execute_model",
    "schedule",
    "out_copy",
    "out_send",
    "loop",
    "load_model",
    "\x1b[2J\n",
]
WAITS = [
    "",
    "worker:*/main",
    "core:0/main",
    "worker:0",
    "worker:1/output",
    "nobody:3/x",
    "tcp://[::1]:9",
    "a\nb,,*",
]
CALLS = ["run_kernel@m.py:1", "wait@threading.py:3", "all_reduce@p.py:2", "f@/\x00\x1b.py:9"]
WCHANS = ["", "futex_do_wait", "hrtimer_nanosleep", "anon_pipe_write", "nvidia_poll", "\x07"]


@st.composite
def frames(draw: st.DrawFn) -> tuple[Frame, ...]:
    out = []
    for text in draw(st.lists(st.sampled_from(CALLS), max_size=3)):
        name, _, where = text.partition("@")
        file, _, line = where.rpartition(":")
        out.append(Frame(name, file, int(line)))
    return tuple(out)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """An engine in any condition, with a finding about any part of it, or about none."""
    build = Build(ready=draw(st.booleans()), later=draw(st.integers(0, 2)))
    shape = [("api", 0), ("core", 0), ("worker", 0), ("worker", 1)]
    for n, (role, rank) in enumerate(draw(st.lists(st.sampled_from(shape), max_size=5))):
        pid = 10 * (n + 1)
        member = build.member(
            pid,
            role,
            rank,
            state=draw(st.sampled_from("RSDTtZ")),
            cpu_share=draw(st.sampled_from([0.0, 0.3, 0.7, 1.0])),
            tracer_pid=draw(st.sampled_from([0, 0, 7])),
            rung=draw(st.sampled_from(list(Rung))),
            attached=draw(st.booleans()),
            gone_tids=frozenset(draw(st.sampled_from([[], [pid], [pid + 2]]))),
        )
        flag = st.sampled_from([None, True, False])
        wchan = draw(st.sampled_from(WCHANS))
        member.threads = {pid: (member.state, member.cpu_share, wchan)}
        member.stacks = tuple(
            ThreadStack(pid + k, f"t{k}\n", draw(frames()), draw(flag), draw(flag))
            for k in range(draw(st.integers(0, 3)))
        )
        for k, name in enumerate(
            draw(st.sampled_from([[], ["main"], ["main", "output"], ["loop"]]))
        ):
            build.lane(
                member,
                name,
                draw(st.sampled_from(PHASES)),
                cls=draw(st.sampled_from(list(LaneClass))),
                on=draw(st.sampled_from(WAITS)),
                age=draw(st.sampled_from([0.0, 5.0, 61.0, -3.0])),
                tid=pid + k,
                work=draw(st.integers(0, 2)),
                channel=draw(st.booleans()),
                moved=draw(st.booleans()),
            )
        if draw(st.integers(0, 5)) == 0:
            build.exit(
                member, signal=draw(st.sampled_from([None, 9])), expected=draw(st.booleans())
            )
    case = build.case(draw(judged(build)))
    if draw(st.integers(0, 4)) == 0:
        case = replace(case, snapshot=replace(case.snapshot, image=None))
    if draw(st.booleans()):
        case = replace(case, after=case.snapshot, before=case.snapshot)
    recall = Recall(stopped_since_ns={10: NOW - 10**9})
    return (
        replace(case, snapshot=replace(case.snapshot, recall=recall))
        if draw(st.booleans())
        else case
    )


@st.composite
def judged(draw: st.DrawFn, build: Build) -> Finding:
    rule = draw(st.sampled_from(list(Rule)))
    if build.lanes and draw(st.booleans()):
        return build.late(draw(st.sampled_from(build.lanes)), rule=rule)
    if build.members and draw(st.booleans()):
        member = draw(st.sampled_from(build.members))
        return finding(rule, Subject(pid=member.pid, start_ticks=member.ticks))
    return finding(
        rule, draw(st.sampled_from([Subject(), Subject(process="gone:9", lane="gone:9/x")]))
    )


def honest(case: Case, verdict: Verdict) -> bool:
    """A kind with high confidence has its defining signal in the case."""
    pid, kind = verdict.culprit.pid, verdict.kind
    facts = case.snapshot.processes.get(pid)
    sets = [s[pid] for s in (case.stacks, *case.later) if pid in s]
    owners = [
        [t for t in e.threads if t.owns_gil] for e in sets if e.rung in (Rung.PYSPY, Rung.NATIVE)
    ]
    if kind is Kind.CHILD_DIED:
        return any(e.pid == pid and not e.expected for e in case.snapshot.exits)
    if kind is Kind.PROCESS_STOPPED:
        return facts is not None and facts.state == "T" and not facts.tracer_pid
    if kind is Kind.THREAD_DIED:
        return facts is not None and facts.tids is not None
    if kind is Kind.GIL_HELD:
        return all(owners) and all(t.active is not True for o in owners for t in o[:1])
    if kind is Kind.CPU_RUNAWAY:
        return facts is not None and facts.cpu_ticks > 5000
    if kind is Kind.NEVER_READY:
        return case.snapshot.engine.ready_ns is None
    if kind is Kind.PAUSED_TOO_LONG:
        return case.finding.rule is Rule.PAUSE_EXPIRED
    if kind is Kind.SHUTDOWN_HANG:
        return case.finding.rule is Rule.SHUTDOWN_HANG
    if kind is Kind.DEVICE_WAIT:
        return facts is not None and facts.state in "SDRTt" and bool(verdict.culprit.lane)
    if kind is Kind.DEGRADED:
        return case.finding.rule is Rule.DEGRADED
    if kind is Kind.NO_FORWARD_PROGRESS:
        return case.finding.rule in (Rule.NO_PROGRESS, Rule.REQUEST_SILENT)
    if kind is Kind.ORDER_CYCLE:
        return bool(graph.cycles(verdict.edges))
    if kind is Kind.REMOTE_PEER_WAIT:
        return graph.is_remote(verdict.culprit.process, DEFAULT)
    if kind is Kind.STALE_LOCK_FILE:
        return any(lock.named and not lock.holder for lock in case.objects.locks)
    if kind is Kind.COLLECTIVE_DIVERGENCE:
        lanes = case.snapshot.image.lanes if case.snapshot.image else ()
        return len({x.rank for x in lanes if x.role == verdict.culprit.role}) > 1
    return kind in (Kind.OUTPUT_BLOCKED, Kind.FRONTEND_BLOCKED)


@pytest.mark.slow
@settings(max_examples=60)
@given(cases())
def test_any_case_gets_an_honest_printable_verdict(case: Case) -> None:
    """diagnose never raises, claims nothing with high confidence without its signal, and prints clean."""
    verdict = diagnose(case)
    if verdict.confidence == "high":
        assert honest(case, verdict), verdict
    if verdict.kind is Kind.CHILD_DIED:
        assert verdict.culprit.frame == ""
    culprit = verdict.culprit
    words = (verdict.summary, *verdict.reasons, culprit.phase, culprit.thread, culprit.frame)
    assert all(text.isprintable() for text in words)
    assert verdict.kinds[0] is verdict.kind
    assert 0 < len(verdict.summary) <= 600
    assert verdict.reasons


@pytest.mark.slow
@settings(max_examples=30)
@given(cases(), cases())
def test_refining_never_contradicts(one: Case, two: Case) -> None:
    """A name once given stays; UNKNOWN_STALL alone may become something else."""
    first, second = diagnose(one), diagnose(two)
    final = refine(first, second)
    assert final.kind is first.kind or first.kind is Kind.UNKNOWN_STALL
    assert refine(first, first) == first
