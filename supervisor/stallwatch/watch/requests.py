"""What clients see, told by the gateway: an engine may call itself well and send nothing. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from stallwatch.board.image import BoardImage, LaneClass
from stallwatch.lifecycle.states import State
from stallwatch.watch import fingerprint
from stallwatch.watch.finding import Finding, Rule, Subject
from stallwatch.watch.grading import compile_ns, grade
from stallwatch.watch.leases import leased, overlap
from stallwatch.watch.phases import longest_working
from stallwatch.watch.policy import Policy, S
from stallwatch.watch.snapshot import Snapshot

# A long prompt is computed in many steps and yields no byte before the last of them. A lost request
# looks the same, so this is more time, not an excuse.
WHILE_STEPS_MOVE = 5
MOVED_NS = 10 * S
_BEFORE_ANY = frozenset({"first_token", "whole_answer"})
# Before it was READY nothing is sent to it; while it drains, the drain's own time judges.
_SERVING = frozenset({State.READY, State.SUSPECT, State.STALLED})


def request_silent(snapshot: Snapshot, now_ns: int, policy: Policy) -> Iterator[Finding]:
    """No byte for a request for longer than its limit, and none for any other of this engine.

    An engine that serves others, past this gateway, has lost one request and is not stuck: its time
    begins when it last did so. The gateway ends the lost request, and tells it.

    What excuses lanes excuses the engine towards its clients: a lease, a debugger, compilers at
    work, a phase with a longer limit that somebody wrote down.
    """
    silence, image = snapshot.engine.silence, snapshot.image
    if silence is None or snapshot.engine.state not in _SERVING:
        return
    if image is not None and leased(image, now_ns, policy):
        return
    limit = silence.limit_ns + policy.raised_ns
    since = max(
        silence.since_ns,
        silence.others_ns,
        _compiled(snapshot, silence.since_ns, now_ns, policy, limit_ns=limit),
    )
    held = overlap(snapshot.recall.held, since)
    elapsed = max(0, now_ns - since - held)
    if grade(elapsed, limit, policy) is None:
        return
    if image is not None:
        limit = max(limit, longest_working(image, policy))
        if silence.phase in _BEFORE_ANY and steps_move(image, now_ns):
            limit *= WHILE_STEPS_MOVE
    level = grade(elapsed, limit, policy)
    if level is None:
        return
    many = f", {silence.waiting} are waiting" if silence.waiting > 1 else ""
    notes: tuple[str, ...] = (
        f"gateway: no byte of {silence.phase} for request {silence.request}{many}",
    )
    if held:
        notes = (*notes, f"{held / 1e9:.1f} s of pause or debugger are not counted")
    yield Finding(
        rule=Rule.REQUEST_SILENT,
        level=level,
        subject=Subject(),  # the gateway knows who waits, not who is to blame
        since_ns=since,
        elapsed_ns=elapsed,
        limit_ns=limit,
        key=str(Rule.REQUEST_SILENT),
        fingerprint=fingerprint.of_silence(silence),
        notes=notes,
    )


def steps_move(image: BoardImage, now_ns: int) -> bool:
    """A lane behind the front end counted work, and entered or advanced a phase of it just now."""
    return any(
        lane.role != "api"
        and lane.work > 0
        and lane.phase.cls is LaneClass.WORK
        and now_ns - max(lane.phase.entered_ns, lane.phase.progress_ns) < MOVED_NS
        for lane in image.lanes
        if not lane.closed and lane.stack
    )


def _compiled(
    snapshot: Snapshot, since_ns: int, now_ns: int, policy: Policy, *, limit_ns: int
) -> int:
    """When compilers were last seen at work, as long as they may excuse the engine; else 0."""
    latest = max(snapshot.recall.compiled_ns.values(), default=0)
    return latest if now_ns - since_ns < compile_ns(policy, limit_ns) else 0
