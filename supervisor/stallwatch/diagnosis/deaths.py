"""Which process ended first, of several that did: a cause, or one that followed. Pure.

Times alone cannot tell: a process with many threads takes longer to end than the child that the
kernel kills with it, and the child is then seen gone while its parent is a zombie.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stallwatch.diagnosis.scene import Scene
from stallwatch.watch.finding import Rule
from stallwatch.watch.snapshot import Exit, ProcFacts

SAME_LOOK_NS = 250_000_000  # exits this close together cannot be told apart by time alone
_ORDERLY = (None, 15)  # signals, None is an exit status: how a process ends because another one did
_OWN_FAULT = frozenset({4, 5, 6, 7, 8, 11, 31})  # ILL, TRAP, ABRT, BUS, FPE, SEGV, SYS
_SLEEPS = "STtI"  # who is being killed is awake, or a zombie


@dataclass(frozen=True, slots=True)
class Death:
    """One process that ended. exit None: it is a zombie, and nobody knows its status yet."""

    pid: int
    start_ticks: int
    exit: Exit | None
    reason: str = ""


def first(scene: Scene) -> Death | None:
    """The first process that ended; those that followed are consequences. None: nobody ended."""
    exits = [e for e in _exits(scene) if not e.expected and _matters(scene, e)]
    if not exits:
        return None
    began = min(e.at_ns for e in exits)
    close = [e for e in exits if e.at_ns - began <= SAME_LOOK_NS]
    # A process that ends because another one did says so by an orderly status.
    earliest = min(close, key=lambda e: (e.signal in _ORDERLY, e.at_ns))
    death = Death(earliest.pid, earliest.start_ticks, earliest)
    *followers, root = _ancestry(scene, death)
    if followers:
        names = ", ".join(_name(scene, d.pid, d.start_ticks) for d in followers)
        how = root.exit.words() if root.exit is not None else "a status that is not known yet"
        reason = f"it ended with {how}, and {names} followed it"
        return Death(root.pid, root.start_ticks, root.exit, reason)
    others = len(exits) - 1
    what = "1 other process" if others == 1 else f"{others} other processes"
    after = f"; {what} ended with or after it" if others else ""
    reason = f"it ended with {earliest.words()}, before any other{after}"
    return Death(death.pid, death.start_ticks, earliest, reason)


def forebear(scene: Scene, pid: int, start_ticks: int) -> tuple[int, int] | None:
    """The eldest dead process that this dead one, whose exit nobody saw, came from; None: itself."""
    found = None
    seen = {pid}
    facts = scene.look.processes.get(pid) or scene.case.before.processes.get(pid)
    while facts is not None and facts.ppid not in seen and facts.start_ticks == start_ticks:
        facts = scene.look.processes.get(facts.ppid)
        if facts is None or not _zombie(facts) or not _known(scene, facts.pid, facts.start_ticks):
            break
        start_ticks = facts.start_ticks
        seen.add(facts.pid)
        found = (facts.pid, start_ticks)
    return found


def doubt(scene: Scene, ended: Exit) -> str:
    """Why a killed process may yet have followed its parent, which ended by itself; '' if it did not."""
    parent = _exit_of(scene.case.snapshot.exits, ended)
    if parent is None or parent.signal is not None or parent.expected or ended.signal in _ORDERLY:
        return ""
    if ended.signal in _OWN_FAULT or abs(parent.at_ns - ended.at_ns) > SAME_LOOK_NS:
        return ""
    name = _name(scene, parent.pid, parent.start_ticks)
    return f"{name}, its parent, ended with {parent.words()} at the same time"


def _exits(scene: Scene) -> tuple[Exit, ...]:
    """Known at the confirming look; for a lost thread also at the third one.

    A process that shuts down because another one died loses its threads first: vLLM's engine core
    drops its output thread within 100 ms of a worker's death.
    """
    case = scene.case
    if case.finding.rule is Rule.THREAD_GONE and case.after is not None:
        return case.after.exits
    return case.snapshot.exits


def _ancestry(scene: Scene, death: Death) -> Iterator[Death]:
    """The process itself, then each parent that it followed. Reused pids end no search in a circle."""
    seen: set[int] = set()
    here: Death | None = death
    while here is not None and here.pid not in seen:
        seen.add(here.pid)
        yield here
        here = _followed(scene, here)


def _followed(scene: Scene, child: Death) -> Death | None:
    """The dead parent that this one's end is a consequence of.

    A parent that was killed ends before its child whatever the looks saw; a parent that ended by
    itself may have done so because its child was gone.
    """
    ended = child.exit
    if ended is None or ended.signal in _OWN_FAULT:
        return None
    facts = scene.look.processes.get(ended.ppid)
    zombie = facts is not None and _zombie(facts) and facts.start_ticks <= ended.start_ticks
    after = scene.case.after
    late = (
        after.exits if after is not None and (facts is None or facts.state not in _SLEEPS) else ()
    )
    parent = _exit_of((*scene.case.snapshot.exits, *late), ended)
    if parent is not None and parent.expected:
        return None
    if zombie and facts is not None and _known(scene, facts.pid, facts.start_ticks):
        return Death(facts.pid, facts.start_ticks, parent)
    if parent is None or parent.signal in _ORDERLY or not _matters(scene, parent):
        return None
    if parent.at_ns - ended.at_ns > SAME_LOOK_NS:
        return None
    return Death(parent.pid, parent.start_ticks, parent)


def _exit_of(exits: tuple[Exit, ...], child: Exit) -> Exit | None:
    """The exit of a child's parent: of the process itself, not of a younger one with its pid."""
    return next(
        (e for e in exits if e.pid == child.ppid and e.start_ticks <= child.start_ticks), None
    )


def _name(scene: Scene, pid: int, start_ticks: int) -> str:
    member = scene.member(pid, start_ticks)
    return member.address if member is not None else f"pid {pid}"


def _zombie(facts: ProcFacts) -> bool:
    return facts.state in ("Z", "X")


def _matters(scene: Scene, ended: Exit) -> bool:
    """A root, an attached process, or the one that a rule named; not a compiler that finished."""
    if ended.root or _known(scene, ended.pid, ended.start_ticks):
        return True
    return any(
        f.rule is Rule.PROCESS_GONE and f.subject.pid == ended.pid
        for f in (scene.finding, *scene.case.findings)
    )


def _known(scene: Scene, pid: int, start_ticks: int) -> bool:
    """The root, or a process that attached."""
    image = scene.look.image
    lanes = {(x.pid, x.start_ticks) for x in image.lanes} if image else set()
    root = pid == scene.look.engine.root_pid
    return root or (pid, start_ticks) in lanes or scene.member(pid, start_ticks) is not None
