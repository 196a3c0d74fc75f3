"""Threads and processes that ended or were stopped. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from stallwatch.board.image import BoardImage, LaneClass
from stallwatch.board.seen import lane_at, survey
from stallwatch.watch import fingerprint
from stallwatch.watch.finding import Finding, Level, Rule, Subject
from stallwatch.watch.grading import lane_subject
from stallwatch.watch.policy import Policy, S
from stallwatch.watch.snapshot import Exit, ProcFacts, Snapshot

# A thread pool may retire a thread that idles; only with work waiting, for this long, is that a loss.
IDLE_THREAD_NS = 5 * S


def thread_gone(snapshot: Snapshot, image: BoardImage, now_ns: int) -> Iterator[Finding]:
    """A lane whose thread no longer exists while its process lives."""
    pending = any(p.pending > 0 and not p.detached for p in image.processes)
    stuck = snapshot.recall.stuck_since_ns
    for place, pid, tid in survey(image).lineup.threads:
        facts = snapshot.processes.get(pid)
        if facts is None or facts.tids is None or tid in facts.tids:
            continue
        lane = lane_at(image, place)
        if facts.start_ticks != lane.start_ticks:
            continue  # a reused pid
        if not lane.stack or not _alive(facts):
            continue
        if lane.phase.cls is LaneClass.IDLE and not (
            pending and stuck is not None and now_ns - stuck >= IDLE_THREAD_NS
        ):
            continue
        since = max(lane.phase.entered_ns, lane.phase.progress_ns)
        yield Finding(
            rule=Rule.THREAD_GONE,
            level=Level.OVER,
            subject=lane_subject(lane),
            since_ns=since,
            elapsed_ns=max(0, now_ns - since),
            limit_ns=0,
            key=f"{Rule.THREAD_GONE}:{lane.address}:{lane.pid}:{lane.tid}",
            fingerprint=fingerprint.of_thread(lane),
            notes=(f"thread {lane.tid} of {facts.comm or lane.pid} no longer exists",),
        )


def _alive(facts: ProcFacts) -> bool:
    return facts.state not in ("Z", "X")


def process_gone(snapshot: Snapshot, now_ns: int) -> Iterator[Finding]:
    """An attached process, or the root, ended, and nobody asked it to. Status 0 is no excuse."""
    for exit_ in snapshot.exits:
        member = snapshot.recall.attached.get(exit_.pid)
        if member is None and snapshot.image is not None:
            member = next((p for p in snapshot.image.processes if p.pid == exit_.pid), None)
        if member is not None and member.start_ticks not in (0, exit_.start_ticks):
            member = None  # a reused pid
        if exit_.expected or not (exit_.root or (member is not None and not member.detached)):
            continue
        subject = Subject(pid=exit_.pid, start_ticks=exit_.start_ticks)
        if member is not None:
            subject = Subject(
                process=member.address,
                role=member.role,
                rank=member.rank,
                pid=exit_.pid,
                start_ticks=exit_.start_ticks,
            )
        yield _gone(exit_, subject, now_ns)


def _gone(exit_: Exit, subject: Subject, now_ns: int) -> Finding:
    return Finding(
        rule=Rule.PROCESS_GONE,
        level=Level.OVER,
        subject=subject,
        since_ns=exit_.at_ns,
        elapsed_ns=max(0, now_ns - exit_.at_ns),
        limit_ns=0,
        key=f"{Rule.PROCESS_GONE}:{exit_.pid}:{exit_.start_ticks}",
        fingerprint=(exit_.pid, exit_.start_ticks, exit_.at_ns),
        notes=(exit_.words(),),
    )


def process_stopped(snapshot: Snapshot, now_ns: int, policy: Policy) -> Iterator[Finding]:
    """State T and no tracer: somebody sent SIGSTOP."""
    for pid, since in snapshot.recall.stopped_since_ns.items():
        facts = snapshot.processes.get(pid)
        if facts is None or facts.state != "T" or facts.tracer_pid != 0:
            continue
        elapsed = max(0, now_ns - since)
        member = snapshot.recall.attached.get(pid)
        yield Finding(
            rule=Rule.PROCESS_STOPPED,
            level=Level.OVER if elapsed >= policy.stopped_ns else Level.WARN,
            subject=Subject(
                process=member.address if member else "",
                role=member.role if member else "",
                rank=member.rank if member else 0,
                pid=pid,
                start_ticks=facts.start_ticks,
            ),
            since_ns=since,
            elapsed_ns=elapsed,
            limit_ns=policy.stopped_ns,
            key=f"{Rule.PROCESS_STOPPED}:{pid}:{facts.start_ticks}",
            fingerprint=fingerprint.of_stopped(facts, since),
            notes=("state T, TracerPid 0",),
        )
