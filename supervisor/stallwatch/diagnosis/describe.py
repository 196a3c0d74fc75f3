"""The words of a verdict. Only what the case holds; one line; nothing a worker wrote goes unwashed."""

from __future__ import annotations

from collections.abc import Sequence

from stallwatch.board.image import LaneClass
from stallwatch.diagnosis.kinds import KINDS, Kind
from stallwatch.diagnosis.scene import Scene
from stallwatch.diagnosis.signals import Thread
from stallwatch.diagnosis.suspect import Suspect
from stallwatch.diagnosis.verdict import Culprit
from stallwatch.evidence.redact import redact
from stallwatch.watch.finding import NOTHING_DONE, Finding, Rule

MAX_PART = 200
MAX_SUMMARY = 600
CHANNEL = " -> "  # between writer and reader, in the lane of a culprit that is a channel


def clean(text: str, limit: int = MAX_PART) -> str:
    """Printable and bounded: no secret, no control, format or surrogate character, no line break."""
    text = redact(text)  # before an escape between a name and its value becomes a space
    out = "".join(c if c.isprintable() else " " for c in text[: limit + 1])
    return out if len(out) <= limit else out[: limit - 3] + "..."


def in_kernel(thread: Thread) -> str:
    return f" ({thread.wchan})" if thread.wchan else ""


def lease_owner(scene: Scene, suspect: Suspect) -> str:
    """'lease weight_update of trainer', or 'owner unknown'."""
    process = scene.processes.get(suspect.process)
    if process is None or process.pause is None:
        return "owner unknown"
    lease = process.pause
    return f"lease {lease.name or '?'} of {lease.owner or 'an unnamed owner'}"


def longest_busy(scene: Scene, *, besides: int) -> str:
    """The lane of another process that had been busy longest, if for more than five seconds."""
    busy = [
        x
        for x in scene.lanes.values()
        if x.pid != besides and x.phase.cls not in (LaneClass.IDLE, LaneClass.PAUSE)
        if scene.age_s(x) > 5
    ]
    if not busy:
        return ""
    lane = min(busy, key=scene.since_ns)
    return f"{lane.address} had been in {lane.phase.name} for {scene.age_s(lane):.1f} s"


def count(number: int, noun: str) -> str:
    """'1 lane', '2 lanes', '2 processes'."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith(('s', 'x')) else 's'}"


def summary(
    scene: Scene, suspect: Suspect, named: Culprit, *, kind: Kind, why: Sequence[str]
) -> str:
    """One sentence: who, since when, what was seen, who waits."""
    parts = [_what(scene, suspect, named, kind), *why[:2]]
    text = "; ".join(p for p in parts if p)
    tail = _waiter(suspect, named)
    return clean(f"{text}; {tail}." if tail else f"{text}.", MAX_SUMMARY)


def _who(scene: Scene, named: Culprit) -> str:
    if named.pid and named.process in ("", f"pid:{named.pid}"):
        facts = scene.look.processes.get(named.pid)
        return f"pid {named.pid} ({facts.comm})" if facts and facts.comm else f"pid {named.pid}"
    name = named.process or "the engine"
    return f"{name} (pid {named.pid})" if named.pid else name


def _what(scene: Scene, suspect: Suspect, named: Culprit, kind: Kind) -> str:
    who = _who(scene, named)
    doing = f" while in {named.phase}" if named.phase else ""
    if kind is Kind.CHILD_DIED:
        how = f" with {suspect.exit.words()}" if suspect.exit is not None else ""
        return f"{who} ended{how}{doing}"
    if kind is Kind.PROCESS_STOPPED:
        return f"{who} is stopped{_stopped_for(scene, suspect)}{doing}"
    if kind is Kind.THREAD_DIED:
        return f"{who} lost a thread{doing}"
    if kind is Kind.PAUSED_TOO_LONG:
        return _pause(scene, suspect, who)
    if scene.finding.rule in _WHOLE:
        return f"{_place(scene, suspect, named, who)}; {_whole(scene)}"
    if not named.process and not named.pid:
        return f"{KINDS[kind].meaning}; nobody can be named"
    return _place(scene, suspect, named, who)


# Rules about the engine as a whole: their time is not that of the lane that is named.
_WHOLE = (Rule.NEVER_READY, Rule.SHUTDOWN_HANG, *NOTHING_DONE)


def _place(scene: Scene, suspect: Suspect, named: Culprit, who: str) -> str:
    """Where it is and for how long."""
    if not named.process and not named.pid:
        return "nobody can be named"
    if not named.phase:
        attached = any(p.pid == named.pid for p in scene.processes.values())
        if attached or not named.pid:
            return f"{who} has no lane in a phase"
        return f"{who} is not attached to the board"
    if CHANNEL in named.lane:
        return _channel(scene, named)
    lane = named.lane.partition("/")[2]
    on = f" on lane {lane}" if lane else ""
    moves = ""
    if suspect.lane is not None and scene.finding.rule is Rule.NEVER_READY:
        moves = ", and it moves" if scene.moved(suspect.lane) else ""
    elapsed = _elapsed(scene, suspect)
    has = "has been" if elapsed else "is"
    return f"{who} {has} in {named.phase}{on}{elapsed}{moves}{_from(named)}"


def _channel(scene: Scene, named: Culprit) -> str:
    """What its reader lacks. A reader that polls is as old as its last poll: no time is told then."""
    writer, _, reader = named.lane.partition(CHANNEL)
    who = f"{reader} (pid {named.pid})" if named.pid else reader
    lane = scene.lanes.get(reader)
    still = lane is not None and not scene.moved(lane)
    elapsed = f" for {scene.age_s(lane):.1f} s" if lane is not None and still else ""
    return f"{who} has got nothing from {writer}{elapsed}"


def _whole(scene: Scene) -> str:
    """What a rule about the whole engine measured, against which limit."""
    finding = scene.finding
    took, limit = f"{max(0, finding.elapsed_ns) / 1e9:.1f} s", f"{finding.limit_ns / 1e9:g} s"
    if finding.rule is Rule.SHUTDOWN_HANG:
        return f"{took} have passed since the stop was asked for (grace {limit})"
    if finding.rule is Rule.NO_PROGRESS:
        return f"no pending work was finished for {took} (limit {limit})"
    if finding.rule is Rule.REQUEST_SILENT:
        return f"clients got no byte for {took} (limit {limit})"
    if whole_start(finding):
        return f"the whole start has taken {took} (limit {limit}){_unready(scene)}"
    return f"nothing of the start has moved for {took} (limit {limit}){_unready(scene)}"


def whole_start(finding: Finding) -> bool:
    """The total limit of a start spoke, not that of its silence: things may well move."""
    return finding.rule is Rule.NEVER_READY and finding.key.endswith(":total")


def measured(finding: Finding) -> str:
    """What a finding's elapsed time and limit are about, in a word or two; '' for an event."""
    if finding.rule is Rule.NEVER_READY:
        return "whole start" if whole_start(finding) else "silence of the start"
    return _MEASURED[finding.rule]


_MEASURED = {
    Rule.PHASE_OVER_LIMIT: "silence",
    Rule.NO_PROGRESS: "no work finished",
    Rule.THREAD_GONE: "",
    Rule.PROCESS_GONE: "",
    Rule.PROCESS_STOPPED: "stopped",
    Rule.PAUSE_EXPIRED: "paused",
    Rule.SHUTDOWN_HANG: "since the stop was asked for",
    Rule.DEGRADED: "slow",
    Rule.REQUEST_SILENT: "no byte to a client",
}


def _unready(scene: Scene) -> str:
    if not scene.processes:
        return "; no process has attached"
    unready = [a for a, p in scene.processes.items() if not p.ready and not p.detached]
    if not unready:
        return ""
    more = f" and {len(unready) - 4} more" if len(unready) > 4 else ""
    verb = "has" if len(unready) == 1 else "have"
    return f"; {', '.join(unready[:4])}{more} {verb} not called ready()"


def _stopped_for(scene: Scene, suspect: Suspect) -> str:
    finding = scene.found(Rule.PROCESS_STOPPED)
    if finding is not None and finding.subject.pid == suspect.pid:
        return f" (state T) for {max(0, finding.elapsed_ns) / 1e9:.1f} s"
    seconds = scene.signals(suspect.pid, suspect.start_ticks).stopped_s if suspect.pid else 0.0
    return f" (state T) for {seconds:.1f} s" if seconds else " (state T)"


def _pause(scene: Scene, suspect: Suspect, who: str) -> str:
    finding, process = scene.finding, scene.processes.get(suspect.process)
    lease = process.pause if process is not None else None
    name = lease.name if lease is not None else finding.subject.phase
    owner = (lease.owner if lease is not None else "") or "an unnamed owner"
    over = max(0, finding.elapsed_ns - finding.limit_ns) / 1e9
    lanes = [x for x in scene.lanes.values() if x.address.partition("/")[0] == suspect.process]
    said = [f"{x.name} in {x.phase.name} for {scene.age_s(x):.1f} s" for x in lanes[:4]]
    more = f", {len(lanes) - 4} more" if len(lanes) > 4 else ""
    tail = f"; lanes of {who}: {', '.join(said)}{more}" if said else f", in {who}"
    return f"the pause {name or '?'} of owner {owner} has outlived its lease by {over:.1f} s{tail}"


def _from(named: Culprit) -> str:
    return f", at {named.frame}" if named.frame else ""


def _elapsed(scene: Scene, suspect: Suspect) -> str:
    """The age of the lane's phase; its limit only where that limit is the phase's own."""
    lane = suspect.lane
    if lane is None:
        finding = scene.finding
        if finding.rule is not Rule.PHASE_OVER_LIMIT:
            return ""
    else:
        late = scene.late(lane.address)
        if late is None or late.rule is not Rule.PHASE_OVER_LIMIT:
            return f" for {scene.age_s(lane):.1f} s"
        finding = late
    limit = f" (limit {finding.limit_ns / 1e9:g} s)" if finding.limit_ns > 0 else ""
    return f" for {max(0, finding.elapsed_ns) / 1e9:.1f} s{limit}"


def _waiter(suspect: Suspect, named: Culprit) -> str:
    """Who waits, when the finding came from somebody else."""
    if len(suspect.path) < 2 or suspect.cycle:
        return ""
    own = named.lane or named.process
    if named.lane.startswith(suspect.path[0] + CHANNEL) or own in (
        suspect.path[0],
        suspect.path[0].partition("/")[0],
    ):
        return ""
    return f"{suspect.path[0]} waits for it"
