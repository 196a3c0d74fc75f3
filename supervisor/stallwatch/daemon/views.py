"""From the runner's facts and the last look to what an operator reads. Pure."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from stallwatch.board.image import LaneClass, LaneImage
from stallwatch.clock import seconds
from stallwatch.control.order import natural
from stallwatch.control.service import LaneView, ProcessView
from stallwatch.evidence.redact import Redactor
from stallwatch.lifecycle.engine import After, EngineState
from stallwatch.lifecycle.states import State
from stallwatch.watch.policy import Policy
from stallwatch.watch.snapshot import Snapshot

_PAGE = os.sysconf("SC_PAGE_SIZE")
_NOTHING_KNOWN = Redactor()


def lanes(
    snapshot: Snapshot | None, policy: Policy, now_ns: int, redactor: Redactor = _NOTHING_KNOWN
) -> tuple[LaneView, ...]:
    """Every open lane, by address. Ages are as of now, not of the look; never negative."""
    if snapshot is None or snapshot.image is None:
        return ()
    found = [lane for lane in snapshot.image.lanes if not lane.closed]
    found.sort(key=lambda x: natural(x.address))
    return tuple(_lane(lane, policy, now_ns, redactor.redact) for lane in found)


def _lane(lane: LaneImage, policy: Policy, now_ns: int, shown: Callable[[str], str]) -> LaneView:
    phase = lane.phase
    since = (
        phase.entered_ns
        if phase.cls is LaneClass.IDLE
        else max(phase.entered_ns, phase.progress_ns)
    )
    return LaneView(
        address=shown(lane.address),
        cls=phase.cls.name.lower(),
        phase=shown(phase.name),
        age_s=max(0.0, seconds(now_ns - since)),
        limit_s=seconds(policy.limit(phase)),
        beats=lane.beats,
        work=lane.work,
        pid=lane.pid,
        tid=lane.tid,
        wait_on=shown(lane.wait_on),
        text=shown(lane.text),
        details=tuple((shown(name), value) for name, value in lane.details),
        channel=lane.channel,
        torn=lane.torn,
    )


def processes(
    snapshot: Snapshot | None, members: Mapping[int, int], redactor: Redactor = _NOTHING_KNOWN
) -> tuple[ProcessView, ...]:
    """Every living member: attached ones by address first, then the others by pid."""
    if snapshot is None:
        return ()
    attached = {p.pid: p for p in snapshot.image.processes} if snapshot.image else {}
    out: list[ProcessView] = []
    for pid, facts in snapshot.processes.items():
        if pid not in members:
            continue
        known = attached.get(pid)
        known = known if known is not None and known.start_ticks == facts.start_ticks else None
        out.append(
            ProcessView(
                address=redactor.redact(known.address) if known else f"pid:{pid}",
                pid=pid,
                state=facts.state,
                ready=bool(known and known.ready),
                pending=known.pending if known else 0,
                attached=known is not None,
                comm=redactor.redact(facts.comm),
                rss_bytes=facts.rss_pages * _PAGE,
            )
        )
    return tuple(sorted(out, key=lambda p: (not p.attached, natural(p.address))))


def comes_back(state: EngineState, now_ns: int) -> bool:
    """It is down or being ended, and the life table starts it again without anybody's help."""
    if state.state is State.BACKOFF:
        return True
    if state.state not in (State.STALLED, State.FAILED) or not state.up or not state.wanted:
        return False
    if state.enforce == "observe":
        return False
    return state.after is After.AGAIN or (
        state.after is After.RESTART and not state.budget.refusal(now_ns)
    )


def top_frame(report: Mapping[str, object] | None) -> str:
    """The culprit's frame of a report, or ''."""
    culprit = report.get("culprit") if report else None
    frame = culprit.get("frame") if isinstance(culprit, Mapping) else ""
    return frame if isinstance(frame, str) else ""


def tail(lines: Sequence[str], count: int) -> list[str]:
    """The last `count` lines."""
    return list(lines[-count:]) if count > 0 else []
