"""Which limit is in force, and what a clock that ran so long means. Pure."""

from __future__ import annotations

from stallwatch.board.image import LaneClass, LaneImage, PhaseFrame
from stallwatch.lifecycle.states import State
from stallwatch.watch.finding import Level, Subject
from stallwatch.watch.policy import MOST_COMPILE, MOST_SCALE, TOKENS_PER_LIMIT, Policy
from stallwatch.watch.snapshot import EngineFacts, Snapshot

# Event loops do not compile: the warm-up exemption must not hide a blocked one for half an hour.
NEVER_COMPILES = frozenset({"loop"})

# Details that say how many tokens a step computes.
BATCHED = frozenset({"tokens", "batched_tokens", "num_tokens", "scheduled_tokens", "prompt_tokens"})

_COMPILE = PhaseFrame("compile", LaneClass.WORK, 0, 0, 0)


def grade(elapsed_ns: int, limit_ns: int, policy: Policy) -> Level | None:
    """OVER at the limit, WARN at warn_fraction of it, None before; a limit of 0 never speaks."""
    if limit_ns <= 0:
        return None
    if elapsed_ns >= limit_ns:
        return Level.OVER
    return Level.WARN if elapsed_ns >= limit_ns * policy.warn_fraction else None


def compile_ns(policy: Policy, limit_ns: int) -> int:
    """How long a phase of serving may take in all while compilers are seen at work for it."""
    return max(limit_ns, min(policy.limit(_COMPILE), MOST_COMPILE * limit_ns))


def starting(facts: EngineFacts) -> bool:
    """True until the incarnation was READY once; SUSPECT can be entered from STARTING."""
    return facts.ready_ns is None and facts.state in (State.STARTING, State.SUSPECT)


def warm_up_ns(snapshot: Snapshot, policy: Policy) -> int:
    """The least limit of work and wait phases while shapes may still compile; 0 afterwards.

    Before READY the start limits judge (peers rightly wait for the slowest loader); then the
    first `compile_steps` steps may each compile, whoever waits for them included.
    """
    steps = snapshot.recall.steps
    if steps is None or policy.compile_steps <= 0:
        return 0
    if starting(snapshot.engine):
        return max(policy.limit(_COMPILE), policy.start_ns)
    return policy.limit(_COMPILE) if steps < policy.compile_steps else 0


def frame_limit(frame: PhaseFrame, policy: Policy, warm_up: int = 0) -> int:
    """The limit in force for one level of a stack, in ns; 0: none."""
    limit = policy.limit(frame)
    if warm_up and limit and frame.cls in (LaneClass.WORK, LaneClass.WAIT):
        return limit if frame.name in NEVER_COMPILES else max(limit, warm_up)
    return limit


def scale(lane: LaneImage, frame: PhaseFrame) -> float:
    """How much longer the innermost phase may take because of the tokens it was given (>= 1)."""
    if frame is not lane.phase or frame.cls is not LaneClass.WORK:
        return 1.0
    tokens = next((n for name, n in lane.details if name in BATCHED), 0)
    return min(max(1.0, tokens / TOKENS_PER_LIMIT), float(MOST_SCALE))


def lane_subject(lane: LaneImage, phase: str = "") -> Subject:
    """The lane as the subject of a finding."""
    return Subject(
        process=f"{lane.role}:{lane.rank}",
        role=lane.role,
        rank=lane.rank,
        pid=lane.pid,
        start_ticks=lane.start_ticks,
        tid=lane.tid,
        lane=lane.address,
        phase=phase or lane.phase.name,
    )
