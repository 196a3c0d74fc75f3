"""From findings to notices: two looks, warnings once, extensions once. Pure, state by value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from stallwatch.watch import fingerprint
from stallwatch.watch.finding import Finding, Level, Rule
from stallwatch.watch.notice import Confirmed, Debugged, Extended, Notice, Warned
from stallwatch.watch.policy import Policy
from stallwatch.watch.snapshot import Snapshot
from stallwatch.watch.witness import lateness, witness

MAX_STRETCHES = 512
# Two looks closer than this are one look: a resumed process must get the chance to move.
LEAST_GAP_NS = 30_000_000
LEAST_REST_NS = 1_000_000_000
MAX_REST_NS = 60_000_000_000

# What no starved host and no debugger explains: an end, or a stop by signal.
_FACTS = frozenset({Rule.PROCESS_GONE, Rule.THREAD_GONE, Rule.PROCESS_STOPPED})


@dataclass(frozen=True, slots=True)
class Stretch:
    """One finding followed over looks. A new `since_ns` is a new stretch: something moved."""

    since_ns: int
    before: Snapshot
    late_ns: int = 0
    warned: bool = False
    extended_ns: int = 0  # what a witness bought; 0: none yet
    allowed_ns: int = 0  # the limit that holds since then, by the finding's own clock
    hold_until_ns: int = 0
    late_then_ns: int = 0  # of late_ns, what the extension has paid for
    witness: str = ""
    over: fingerprint.Fingerprint | None = None  # of the first look that found it over
    over_ns: int = 0
    confirmed: fingerprint.Fingerprint | None = None
    withdrawn: int = 0
    rest_until_ns: int = 0


@dataclass(frozen=True, slots=True)
class Tracker:
    """All stretches of one engine. Bounded; start with Tracker()."""

    incarnation: int = -1
    stretches: Mapping[str, Stretch] = field(default_factory=dict)
    debugged: Mapping[int, tuple[int, bool]] = field(default_factory=dict)  # pid: since, expired

    @property
    def unconfirmed(self) -> bool:
        """True while a second look is due: the judge then looks again sooner."""
        return any(s.over is not None and s.confirmed != s.over for s in self.stretches.values())


def observe(
    state: Tracker,
    findings: tuple[Finding, ...],
    snapshot: Snapshot,
    policy: Policy,
    *,
    period_ns: int = 100_000_000,
) -> tuple[Tracker, tuple[Notice, ...]]:
    """Fold one look in. The look's time is `snapshot.now_ns`; `findings` are the rules' answer."""
    if state.incarnation != snapshot.engine.incarnation:
        state = Tracker(incarnation=snapshot.engine.incarnation)
    notices: list[Notice] = []
    debugged, free = _debuggers(state, snapshot, policy, notices)
    late = lateness(snapshot.host, period_ns)
    slim = _slim(snapshot) if findings else snapshot
    stretches: dict[str, Stretch] = {}
    for finding in findings[:MAX_STRETCHES]:
        stretch = state.stretches.get(finding.key)
        if stretch is None or stretch.since_ns != finding.since_ns:
            stretch = Stretch(since_ns=finding.since_ns, before=slim)
        stretch = replace(stretch, late_ns=stretch.late_ns + late)
        if finding.level is Level.WARN:
            stretch = _warn(stretch, finding, snapshot, notices)
        elif free or finding.rule in _FACTS:
            stretch = _over(stretch, finding, findings, snapshot, notices, policy=policy)
        else:
            stretch = replace(stretch, over=None)
        stretches[finding.key] = stretch
    return Tracker(state.incarnation, stretches, debugged), tuple(notices)


def moved(finding: Finding, snapshot: Snapshot) -> bool:
    """The third look, after the first stacks: True withdraws the finding.

    A board that cannot be read proves no movement.
    """
    return fingerprint.current(finding, snapshot) != finding.fingerprint


def rearmed(state: Tracker, key: str, now_ns: int) -> Tracker:
    """The finding was withdrawn: if it stands still again, in whatever image, it is told again.

    After a rest that doubles each time: stacks are never taken of a process without a pause.
    """
    stretch = state.stretches.get(key)
    if stretch is None:
        return state
    rest = min(MAX_REST_NS, LEAST_REST_NS << stretch.withdrawn)
    fresh = replace(
        stretch,
        over=None,
        confirmed=None,
        withdrawn=min(stretch.withdrawn + 1, 16),
        rest_until_ns=now_ns + rest,
    )
    return replace(state, stretches={**state.stretches, key: fresh})


def _warn(stretch: Stretch, finding: Finding, snapshot: Snapshot, notices: list[Notice]) -> Stretch:
    before = _with_threads(stretch.before, snapshot)
    if not stretch.warned:
        notices.append(Warned(finding, snapshot))
    return replace(stretch, warned=True, before=before, over=None)


def _over(  # noqa: PLR0917 - one step of the loop above
    stretch: Stretch,
    finding: Finding,
    findings: tuple[Finding, ...],
    snapshot: Snapshot,
    notices: list[Notice],
    *,
    policy: Policy,
) -> Stretch:
    now = snapshot.now_ns
    if now < stretch.rest_until_ns and finding.rule is not Rule.PROCESS_GONE:
        return replace(stretch, over=None)
    if finding.rule not in _FACTS:
        if now < stretch.hold_until_ns:
            return replace(stretch, over=None)
        held = _extend(stretch, finding, snapshot, notices)
        if held is not None:
            return held
    if finding.rule is not Rule.PROCESS_GONE and stretch.over != finding.fingerprint:
        return replace(stretch, over=finding.fingerprint, over_ns=now)
    if stretch.confirmed == finding.fingerprint:
        return stretch
    at_once = finding.rule is Rule.PROCESS_GONE  # an exit cannot un-happen
    if not at_once and now - stretch.over_ns < LEAST_GAP_NS:
        return stretch
    if stretch.extended_ns:
        finding = _with_extension(finding, stretch)
    notices.append(Confirmed(finding, findings, stretch.before, snapshot, policy))
    return replace(stretch, over=finding.fingerprint, confirmed=finding.fingerprint)


def _with_extension(finding: Finding, stretch: Stretch) -> Finding:
    """The limit that was in force in the end. Later than that only by what our looks came late."""
    notes = [f"extended by {stretch.extended_ns / 1e9:.2f} s: {stretch.witness}"]
    if (late := stretch.late_ns - stretch.late_then_ns) > 0:
        notes.append(f"after that our own looks came {late / 1e9:.2f} s late in all")
    return replace(finding, limit_ns=stretch.allowed_ns, notes=(*finding.notes, *notes))


def _extend(
    stretch: Stretch, finding: Finding, snapshot: Snapshot, notices: list[Notice]
) -> Stretch | None:
    """Hold the finding back if a host witness speaks, once per stretch."""
    if stretch.extended_ns or stretch.confirmed is not None:
        return None
    seen = witness(
        stretch.before, snapshot, late_ns=stretch.late_ns, limit_ns=max(1, finding.limit_ns)
    )
    if seen is None:
        return None
    words, by_ns = seen
    noted = replace(finding, notes=(*finding.notes, words))
    notices.append(Extended(noted, words, by_ns))
    return replace(
        stretch,
        extended_ns=by_ns,
        # From this look on, not from the limit: who was held up as we were gets that time awake.
        allowed_ns=finding.elapsed_ns + by_ns,
        late_then_ns=stretch.late_ns,
        hold_until_ns=snapshot.now_ns + by_ns,
        witness=words,
        over=None,
    )


def _debuggers(
    state: Tracker, snapshot: Snapshot, policy: Policy, notices: list[Notice]
) -> tuple[Mapping[int, tuple[int, bool]], bool]:
    """Tell each foreign tracer once; True when no debugger holds the limits."""
    out: dict[int, tuple[int, bool]] = {}
    for pid, since in snapshot.recall.traced_since_ns.items():
        told = state.debugged.get(pid)
        expired = snapshot.now_ns - since >= policy.debugger_ns
        out[pid] = (since, expired)
        if told != (since, expired):
            facts = snapshot.processes.get(pid)
            tracer = facts.tracer_pid if facts else 0
            notices.append(Debugged(pid, since, tracer, expired))
    return out, all(expired for _, expired in out.values())


def _with_threads(before: Snapshot, snapshot: Snapshot) -> Snapshot:
    """Thread facts are read only under suspicion: the look that raised it has none yet."""
    if any(p.thread_facts for p in before.processes.values()):
        return before
    if not any(p.thread_facts for p in snapshot.processes.values()):
        return before
    return _slim(snapshot)


def _slim(snapshot: Snapshot) -> Snapshot:
    """What deltas need: many stretches may keep one of these for half a limit."""
    processes = {
        pid: replace(facts, tids=None) if facts.tids else facts
        for pid, facts in snapshot.processes.items()
    }
    return replace(snapshot, processes=processes, exits=snapshot.exits[-64:])
