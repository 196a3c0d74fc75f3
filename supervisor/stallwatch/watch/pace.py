"""How fast each lane works while work is pending, against what it did before. Pure.

Windows of one length; the median of the earlier ones is the baseline. One slow window is a long
prompt; several in a row, a tenth of the baseline each, are a decay. Work alone proves nothing: fewer
clients mean fewer tokens a step. Only a loop that was also seen to move at a tenth of the looks has
slowed down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from stallwatch.watch.policy import Policy
from stallwatch.watch.snapshot import Slow

KEPT = 32  # windows of the baseline
LEAST_WINDOWS = 5  # before a baseline means anything
LEAST_WORK = 10  # per window: rarer work has no rate
RATIO = 10
IN_A_ROW = 3
MAX_LANES = 1024

Slots = Mapping[int, tuple[int, int, int]]  # slot -> (pid, work, looks at which it had moved)
Done = tuple[int, int]  # work and moves of one window


@dataclass(frozen=True, slots=True)
class Pace:
    """State between looks. Start with Pace()."""

    begun_ns: int = 0
    works: Slots = field(default_factory=dict)
    history: Mapping[int, tuple[Done, ...]] = field(default_factory=dict)
    slow: Mapping[int, Slow] = field(default_factory=dict)


def keep_pace(pace: Pace, works: Slots, now_ns: int, policy: Policy, *, busy: bool) -> Pace:
    """Fold one look in. busy: work is pending and nothing excuses anybody."""
    if policy.degraded_ns <= 0:
        return pace
    if not busy or pace.begun_ns == 0:
        # Idle time has no rate: a window counts only if all of it was busy.
        if not busy and pace.begun_ns == 0:
            return pace
        return replace(pace, begun_ns=now_ns if busy else 0, works=works, slow={})
    if now_ns - pace.begun_ns < policy.degraded_ns:
        return pace
    history: dict[int, tuple[Done, ...]] = {}
    slow: dict[int, Slow] = {}
    for slot, (pid, work, beats) in list(works.items())[:MAX_LANES]:
        before = pace.works.get(slot)
        if before is None or before[0] != pid or work < before[1]:
            continue
        past, done = pace.history.get(slot, ()), (work - before[1], beats - before[2])
        usual = _usual(past)
        if usual >= LEAST_WORK and done[0] > 0 and _tenth(done, past):
            old = pace.slow.get(slot)
            began = old.since_ns if old is not None else pace.begun_ns
            windows = old.windows + 1 if old is not None else 1
            slow[slot] = Slow(began, windows, done[0], int(usual))
            history[slot] = past  # a slow window must not become the usual
        else:
            history[slot] = (*past, done)[-KEPT:]
    return Pace(now_ns, works, history, slow)


def _usual(past: tuple[Done, ...], which: int = 0) -> float:
    """The median of earlier windows; 0 while there are too few."""
    return median(d[which] for d in past) if len(past) >= LEAST_WINDOWS else 0


def _tenth(done: Done, past: tuple[Done, ...]) -> bool:
    """Both the work and the turns of the loop are down to a tenth."""
    return all(done[n] * RATIO <= _usual(past, n) for n in (0, 1))


def decayed(slow: Slow) -> bool:
    """Slow for long enough to be told."""
    return slow.windows >= IN_A_ROW
