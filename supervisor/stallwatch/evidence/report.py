"""The report of one stall: a plain dict with stable keys, bounded in every direction. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from stallwatch.board.image import LaneImage, PhaseFrame
from stallwatch.clock import seconds
from stallwatch.diagnosis.describe import measured
from stallwatch.diagnosis.verdict import Case, Culprit, Verdict
from stallwatch.evidence import stacktree
from stallwatch.evidence.clean import CAP, clean
from stallwatch.evidence.model import ProcessEvidence, Rung, ThreadStack
from stallwatch.evidence.redact import Redactor, hash_request_id, redact, redact_argv
from stallwatch.heartbeat.failure import Failure
from stallwatch.watch.policy import Policy
from stallwatch.watch.snapshot import Snapshot
from stallwatch.watch.usage import usage

SCHEMA = 1
MAX_PROCESSES = 64
MAX_LANES = 32
MAX_THREADS = 64
MAX_FRAMES = 48
MAX_SAMPLES = 6
MAX_LOG_LINES = 200
MAX_TIMELINE = 100
MAX_REQUESTS = 256
_RUNGS = (Rung.NONE, Rung.PROC, Rung.FAULTHANDLER, Rung.PYSPY, Rung.NATIVE)

_NOTHING_KNOWN = Redactor()


@dataclass(frozen=True, slots=True)
class Context:
    """What a report holds beside failure, verdict and case. Secrets are redacted here, not before."""

    detected_at: float  # seconds since the epoch
    command: Sequence[str] = ()
    policy: Policy = field(default_factory=Policy)
    gpu: Mapping[str, Any] = field(default_factory=dict)
    host: Mapping[str, Any] = field(default_factory=dict)  # what the snapshot's HostFacts lack
    requests: Sequence[str] = ()  # ids of requests in flight, in clear
    timeline: Sequence[tuple[float, str]] = ()  # seconds from detection, what happened
    redactor: Redactor = field(default_factory=Redactor)  # what the engine was given as secrets


def build_report(
    failure: Failure, verdict: Verdict, case: Case, context: Context
) -> dict[str, Any]:
    """The report. Keys and their order are a public contract; the id salts the request hashes."""
    culprit = verdict.culprit
    sets = [case.stacks, *case.later[: MAX_SAMPLES - 1]]
    kinds = verdict.kinds or (verdict.kind,)
    report = {
        "schema": SCHEMA,
        "id": failure.id,
        "engine": _said(failure.engine),
        "incarnation": failure.incarnation,
        "kind": str(verdict.kind),
        "kinds": [str(kind) for kind in kinds][:8],
        "confidence": _said(verdict.confidence, 32),
        "summary": _said(verdict.summary, 500),
        "culprit": _culprit(culprit),
        "elapsed_s": round(failure.elapsed_s, 3),
        "limit_s": round(failure.limit_s, 3),
        "action": _said(failure.action, 32),
        "detected_at": rfc3339(context.detected_at),
        "rung": str(_overall(sets, culprit.pid)),
        "processes": processes(case, context.policy, sets),
        "stacks": [entry for i, found in enumerate(sets) for entry in stacks(found, i)],
        "stack_tree": stacktree.build(_richest(sets)),
        "wait_graph": _wait_graph(verdict),
        "host": _host(case, context),
        "gpu": bounded(context.gpu) or {"available": False, "why": "not asked"},
        "logs": {"tail": _log(case, context.redactor, failure.id)[-MAX_LOG_LINES:]},
        "requests": _requests(context.requests, failure.id),
        "timeline": [
            {"at_s": round(at, 3), "text": _said(text, 300)}
            for at, text in list(context.timeline)[-MAX_TIMELINE:]
        ],
    }
    return context.redactor.redact_all(report)


def rfc3339(wall: float) -> str:
    """Seconds since the epoch as RFC 3339 in UTC, with milliseconds."""
    text = datetime.fromtimestamp(wall, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def live(
    evidence: Mapping[int, ProcessEvidence], redactor: Redactor = _NOTHING_KNOWN
) -> dict[str, Any]:
    """Stacks taken on request, in the words of a report: rung, processes, stacks, stack_tree."""
    found = list(evidence.values())[:MAX_PROCESSES]
    shown = {
        "rung": str(min((e.rung for e in found), key=_RUNGS.index, default=Rung.NONE)),
        "processes": [
            {
                "address": e.target.address,
                "role": _said(e.target.role),
                "rank": e.target.rank,
                "pid": e.target.pid,
                "state": e.facts.get("state", ""),
                "rung": str(e.rung),
                "took_s": e.took_s,
                "facts": bounded(e.facts),
                "problems": _problems(e),
            }
            for e in found
        ],
        "stacks": stacks(evidence, 0),
        "stack_tree": stacktree.build(evidence),
    }
    return redactor.redact_all(shown)


def artefacts(case: Case, redactor: Redactor = _NOTHING_KNOWN) -> dict[str, bytes]:
    """What a report leaves out, as files by name: every thread of every sample, and the log."""
    everything = [
        {
            "sample": i,
            "process": e.target.address,
            "pid": e.target.pid,
            "rung": str(e.rung),
            "facts": bounded(e.facts),
            "thread_facts": {str(tid): bounded(f) for tid, f in e.thread_facts.items()},
            "threads": [_thread(t, len(t.frames)) for t in e.threads],
            "problems": _problems(e),
        }
        for i, found in enumerate((case.stacks, *case.later))
        for e in found.values()
    ]
    log = "\n".join(_log(case, redactor, ""))
    kept = json.dumps(redactor.redact_all(everything), indent=1)
    return {"stacks.json": kept.encode(), "log.txt": log.encode()}


def processes(
    case: Case, policy: Policy, sets: Sequence[Mapping[int, ProcessEvidence]] = ()
) -> list[dict[str, Any]]:
    """Every process of the look that confirmed, the dead ones too, in the order api, core, ..."""
    snapshot = case.snapshot
    exits = {e.pid: e for e in snapshot.exits}
    attached = {p.pid: p for p in snapshot.image.processes} if snapshot.image else {}
    pids = dict.fromkeys([*attached, *snapshot.processes, *exits, *(p for s in sets for p in s)])
    rows = []
    for pid in pids:
        entry = attached.get(pid)
        facts = snapshot.processes.get(pid)
        known = [s[pid] for s in sets if pid in s]
        role, rank = _identity(case, pid, known)
        rows.append(
            {
                "address": entry.address if entry else (f"{role}:{rank}" if role else f"pid:{pid}"),
                "role": _said(role),
                "rank": rank,
                "pid": pid,
                "state": facts.state if facts else ("exited" if pid in exits else "gone"),
                "rung": str(max((e.rung for e in known), key=_RUNGS.index, default=Rung.NONE)),
                "exit": exits[pid].words() if pid in exits else "",
                "attached": entry is not None,
                "ready": entry.ready if entry else False,
                "pending": entry.pending if entry else 0,
                "comm": _said(facts.comm if facts else "", 64),
                "facts": bounded(known[0].facts) if known else {},
                "used": _used(case, pid),
                "lanes": _lanes(snapshot, pid, policy),
                "problems": list(dict.fromkeys(p for e in known for p in _problems(e)))[:16],
            }
        )
    rows.sort(key=lambda row: (row["role"] == "", str(row["role"]), row["rank"], row["pid"]))
    return rows[:MAX_PROCESSES]


def _used(case: Case, pid: int) -> dict[str, Any]:
    """CPU, page faults and bytes from the look that raised the suspicion to the one that confirmed it."""
    found = usage(case.before, case.snapshot, pid)
    if found is None:
        return {}
    return {
        "window_s": round(found.window_s, 3),
        "cpu_s": round(found.cpu_ticks / max(case.clock_ticks, 1), 2),
        "minor_faults": found.minor_faults,
        "major_faults": found.major_faults,
        "read_bytes": found.read_bytes,
        "written_bytes": found.written_bytes,
    }


def stacks(found: Mapping[int, ProcessEvidence], sample: int) -> list[dict[str, Any]]:
    """One sample of all processes; sample 0 is the first look."""
    return [
        {
            "process": _said(e.target.address),
            "pid": e.target.pid,
            "sample": sample,
            "rung": str(e.rung),
            "took_s": e.took_s,
            "threads": [_thread(t) for t in e.threads[:MAX_THREADS]],
        }
        for e in list(found.values())[:MAX_PROCESSES]
        if e.threads
    ]


def _thread(thread: ThreadStack, frames: int = MAX_FRAMES) -> dict[str, Any]:
    return {
        "tid": thread.tid,
        "name": _said(thread.name),
        "active": thread.active,
        "owns_gil": thread.owns_gil,
        "frames": [_said(str(frame)) for frame in thread.frames[:frames]],
        "left_out": max(0, len(thread.frames) - frames),
    }


def _identity(case: Case, pid: int, known: Sequence[ProcessEvidence]) -> tuple[str, int]:
    """Role and rank: from the board, from the evidence, or from the finding about a dead one."""
    if case.snapshot.image:
        for entry in case.snapshot.image.processes:
            if entry.pid == pid:
                return entry.role, entry.rank
    for evidence in known:
        if evidence.target.role:
            return evidence.target.role, evidence.target.rank
    for finding in (case.finding, *case.findings):
        if finding.subject.pid == pid and finding.subject.role:
            return finding.subject.role, finding.subject.rank
    return "", 0


def _lanes(snapshot: Snapshot, pid: int, policy: Policy) -> list[dict[str, Any]]:
    lanes = snapshot.image.lanes if snapshot.image else ()
    own = [lane for lane in lanes if lane.pid == pid and not lane.closed]
    return [_lane(lane, snapshot.now_ns, policy) for lane in own[:MAX_LANES]]


def _lane(lane: LaneImage, now_ns: int, policy: Policy) -> dict[str, Any]:
    return {
        "address": _said(lane.address),
        **_phase(lane.phase, now_ns, policy),
        "beats": lane.beats,
        "work": lane.work,
        "wait_on": _said(lane.wait_on),
        "details": {_said(name, 64): value for name, value in lane.details[:8]},
        "text": _said(lane.text),
        "tid": lane.tid,
        "channel": lane.channel,
        "torn": lane.torn,
        "outer": [_phase(frame, now_ns, policy) for frame in lane.stack[:-1]],
    }


def _phase(frame: PhaseFrame, now_ns: int, policy: Policy) -> dict[str, Any]:
    since = max(frame.entered_ns, frame.progress_ns)
    return {
        "class": frame.cls.name.lower(),
        "phase": _said(frame.name),
        "age_s": round(max(0.0, seconds(now_ns - since)), 3),
        "limit_s": round(seconds(policy.limit(frame)), 3),
    }


def _culprit(culprit: Culprit) -> dict[str, Any]:
    return {
        "process": _said(culprit.process),
        "role": _said(culprit.role),
        "rank": culprit.rank,
        "pid": culprit.pid,
        "lane": _said(culprit.lane),
        "phase": _said(culprit.phase),
        "thread": _said(culprit.thread),
        "frame": _said(culprit.frame),
    }


def _overall(sets: Iterable[Mapping[int, ProcessEvidence]], culprit: int) -> Rung:
    """The best rung for the culprit; without one, the worst of all processes: no flattering."""
    best: dict[int, Rung] = {}
    for found in sets:
        for pid, evidence in found.items():
            best[pid] = max(best.get(pid, Rung.NONE), evidence.rung, key=_RUNGS.index)
    if culprit in best:
        return best[culprit]
    return min(best.values(), key=_RUNGS.index, default=Rung.NONE)


def _richest(sets: Sequence[Mapping[int, ProcessEvidence]]) -> dict[int, ProcessEvidence]:
    """For the tree: of each process its native look, else the first that has stacks.

    A refused native look has no threads: it replaces nothing.
    """
    merged: dict[int, ProcessEvidence] = {}
    for found in sets:
        for pid, evidence in found.items():
            known = merged.get(pid)
            native = evidence.rung is Rung.NATIVE and bool(evidence.threads)
            better = native and known is not None and known.rung is not Rung.NATIVE
            if known is None or better or (evidence.threads and not known.threads):
                merged[pid] = evidence
    return merged


def _wait_graph(verdict: Verdict) -> dict[str, Any]:
    edges = [
        {"waiter": _said(e.waiter), "target": _said(e.target), "why": _said(e.why)}
        for e in verdict.edges[:256]
    ]
    return {"edges": edges, "reasons": [_said(r, 300) for r in verdict.reasons[:32]]}


def _host(case: Case, context: Context) -> dict[str, Any]:
    host = case.snapshot.host
    return {
        "command": [_said(item, 500) for item in redact_argv(context.command[:256])],
        "late_s": round(seconds(host.late_ns), 3),
        "throttled_usec": host.throttled_usec,
        "frozen": host.frozen,
        "cpu_full_usec": host.cpu_full_usec,
        "rule": str(case.finding.rule),
        "measured": measured(case.finding),
        "witnesses": [_said(note, 300) for note in case.finding.notes[:32]],
        **{_said(str(k), 64): bounded(v) for k, v in list(context.host.items())[:64]},
    }


def _requests(ids: Sequence[str], salt: str) -> dict[str, Any]:
    hashed = [hash_request_id(one, salt=salt) for one in ids[:MAX_REQUESTS]]
    return {"in_flight": len(ids), "ids": hashed}


def _log(case: Case, redactor: Redactor, salt: str) -> list[str]:
    return [clean(line, 500) for line in redactor.redact_lines(case.log_tail, salt=salt)]


def _said(text: str, cap: int = CAP) -> str:
    """What an engine wrote: redacted before a cut or a replaced escape could hide a secret."""
    return clean(redact(text), cap)


def _problems(evidence: ProcessEvidence) -> list[str]:
    return [_said(problem, 300) for problem in evidence.problems[:16]]


def bounded(value: Any, depth: int = 4) -> Any:
    """Any JSON-like value, cut to 256 items a level, 4 levels and clean strings."""
    if isinstance(value, str):
        return _said(value, 500)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # NaN and Infinity are no JSON
    if value is None or isinstance(value, bool | int | float):
        return value
    if depth == 0:
        return "…"
    if isinstance(value, Mapping):
        return {_said(str(k), 80): bounded(v, depth - 1) for k, v in list(value.items())[:256]}
    if isinstance(value, list | tuple):
        return [bounded(v, depth - 1) for v in value[:256]]
    return _said(str(value), 200)
