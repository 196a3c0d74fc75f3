"""The verdict: ordered rules from hard facts to likelihoods. UNKNOWN_STALL rather than a guess.

Every rule answers None when its signal is missing. A wrong confident name costs more than a blank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from stallwatch.diagnosis import culprit, describe
from stallwatch.diagnosis.call import Call, Facts
from stallwatch.diagnosis.cpu_rules import gil_held, runaway
from stallwatch.diagnosis.device_rules import device_wait, unknown
from stallwatch.diagnosis.facts_rules import (
    child_died,
    never_ready,
    paused,
    process_stopped,
    shutdown,
    thread_died,
)
from stallwatch.diagnosis.group_rules import (
    degraded,
    divergence,
    error_swallowed,
    lost_wakeup,
    no_forward_progress,
    order_cycle,
    remote_peer,
)
from stallwatch.diagnosis.kinds import Kind
from stallwatch.diagnosis.refine import refine
from stallwatch.diagnosis.scene import Scene
from stallwatch.diagnosis.signals import Process, Thread
from stallwatch.diagnosis.suspect import Suspect
from stallwatch.diagnosis.verdict import Case, Culprit, Verdict
from stallwatch.diagnosis.vocabulary import DEFAULT, Vocabulary
from stallwatch.diagnosis.wait_rules import forked, frontend, lazy_load, output_blocked, stale_lock

__all__ = ["RULES", "diagnose", "refine"]


def diagnose(case: Case, words: Vocabulary = DEFAULT) -> Verdict:
    """Name kind and culprit of one confirmed finding. Pure and total."""
    scene = Scene(case, words)
    suspect = culprit.select(scene)
    process = scene.signals(suspect.pid, suspect.start_ticks) if suspect.pid else Process(0)
    facts = Facts(scene, suspect, process, _lane_thread(scene, suspect, process))
    rule, call = next((r, said) for r in RULES if (said := r(facts)) is not None)
    if call.instead is not None:
        facts = replace(facts, suspect=call.instead)
        suspect = call.instead
    named = _culprit(facts, call)
    reasons = tuple(describe.clean(r) for r in (*suspect.reasons, *call.reasons) if r)
    return Verdict(
        kind=call.kind,
        culprit=named,
        confidence=call.confidence,
        summary=describe.summary(scene, suspect, named, kind=call.kind, why=call.reasons),
        kinds=tuple(dict.fromkeys((call.kind, *call.others, *suspect.hints))),
        reasons=(
            *(reasons or _rested_on(scene, call.kind)),
            *_namesakes(scene, named),
            f"decided by the rule {rule.__name__}",
        ),
        edges=tuple(dict.fromkeys((*scene.edges, *call.edges))),
    )


def _namesakes(scene: Scene, named: Culprit) -> tuple[str, ...]:
    """An address that two processes have says less than it seems: the pid tells them apart."""
    pids = scene.namesakes(named.process) if named.process else []
    if not pids:
        return ()
    listed = ", ".join(map(str, pids[:8]))
    return (describe.clean(f"{len(pids)} processes attached as {named.process}: pids {listed}"),)


def _rested_on(scene: Scene, kind: Kind) -> tuple[str, ...]:
    """A finding is itself the reason of a kind that says no more than the finding does."""
    if kind is Kind.UNKNOWN_STALL:
        return ("no rule had a signal to rest on",)
    return (f"the rule {scene.finding.rule} spoke, and two looks agreed",)


def _lane_thread(scene: Scene, suspect: Suspect, process: Process) -> Thread:
    lane = suspect.lane
    if lane is not None and not lane.channel:
        return process.thread(lane.tid)
    if lane is None and suspect.pid:
        tid = scene.finding.subject.tid if scene.finding.subject.pid == suspect.pid else 0
        return process.thread(tid or suspect.pid)
    return Thread(lane.tid if lane is not None else 0)


def _culprit(facts: Facts, call: Call) -> Culprit:
    who, thread = facts.suspect, call.thread or facts.thread
    whole = call.kind in _WHOLE
    if call.kind is Kind.PROCESS_STOPPED and not thread.samples:
        thread = next((t for t in facts.process.threads.values() if t.samples), thread)
    frame = thread.frame(facts.words) if call.kind not in _FRAMELESS else None
    label = thread.label if who.pid and (thread.samples or thread.exists is not None) else ""
    if not label and thread.tid and call.kind is not Kind.CHILD_DIED:
        label = thread.label
    # A lease's name is no phase of a lane.
    paused = call.kind is Kind.PAUSED_TOO_LONG
    if paused:
        label = describe.lease_owner(facts.scene, who)
    if call.channel:
        return _channel(facts, call)
    return Culprit(
        process=describe.clean(who.process),
        role=describe.clean(who.role),
        rank=who.rank,
        pid=who.pid,
        lane=describe.clean(who.lane.address) if who.lane is not None and not whole else "",
        phase="" if paused else describe.clean(who.phase),
        thread=describe.clean(label),
        frame=describe.clean(str(frame)) if frame is not None else "",
    )


def _channel(facts: Facts, call: Call) -> Culprit:
    """A channel is accused as such: no process of its two ends did wrong."""
    reader = facts.scene.lanes.get(call.channel.rpartition(" -> ")[2])
    return Culprit(
        process=describe.clean(f"{reader.role}:{reader.rank}") if reader is not None else "",
        role=describe.clean(reader.role) if reader is not None else "",
        rank=reader.rank if reader is not None else 0,
        pid=reader.pid if reader is not None else 0,
        lane=describe.clean(call.channel),
        phase=describe.clean(reader.phase.name) if reader is not None else "",
    )


# A lease, and a stop, are of a process: no lane of it did anything.
_WHOLE = (Kind.PAUSED_TOO_LONG, Kind.PROCESS_STOPPED)
_FRAMELESS = (Kind.CHILD_DIED, Kind.THREAD_DIED, Kind.PAUSED_TOO_LONG)


# Hard facts first, then what the kernel says, then what several lanes say together. A rule further
# down never sees what one above it named.
RULES: tuple[Callable[[Facts], Call | None], ...] = (
    child_died,
    process_stopped,
    thread_died,
    paused,
    shutdown,
    degraded,
    order_cycle,
    stale_lock,
    forked,
    output_blocked,
    never_ready,
    gil_held,
    runaway,
    frontend,
    remote_peer,
    lazy_load,
    divergence,
    no_forward_progress,
    error_swallowed,
    lost_wakeup,
    device_wait,
    unknown,
)
