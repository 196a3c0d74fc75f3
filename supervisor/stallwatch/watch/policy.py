"""The limits in force: explicit > configured > learned > default. Immutable, swapped on reload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stallwatch.board.image import LaneClass, PhaseFrame

S = 1_000_000_000

# Defaults by phase name, in ns. Values and their reasons: docs/limits.md (section "Default limits").
DEFAULT_PHASE_LIMITS: Mapping[str, int] = {
    "prefill": 120 * S,
    "compile": 1800 * S,
    "loop": 30 * S,
}
NO_LIMIT = 0
TOKENS_PER_LIMIT = 8192  # a larger batch of tokens has a limit that is higher in proportion ...
MOST_SCALE = 16  # ... up to this: the number is the worker's own word
MOST_COMPILE = 10  # limits that compilers at work may add to a phase of serving


@dataclass(frozen=True, slots=True)
class Policy:
    """Every limit that the rules use; all durations in ns, 0 means no limit."""

    default_ns: int = 60 * S
    start_ns: int = 1800 * S
    start_silence_ns: int = 600 * S
    no_progress_ns: int = 120 * S
    degraded_ns: int = 60 * S  # the window over which a rate of work is taken; 0: never
    phases: Mapping[str, int] = field(default_factory=dict)  # configured, by phase name
    learned: Mapping[str, int] = field(default_factory=dict)
    compile_steps: int = 5  # first steps after a start that use the compile limit
    stopped_ns: int = S // 2  # state T for this long, two looks
    debugger_ns: int = 1800 * S  # a foreign tracer suspends limits at most this long
    pause_cap_ns: int = 14400 * S  # a lease raises limits, it never mutes: longer ones end here
    warn_fraction: float = 0.5
    raised_ns: int = 0  # an operator's pause: every limit is higher by this while it lasts

    def limit(self, frame: PhaseFrame) -> int:
        """The limit of one phase level in ns; 0: none (idle, or a class that is judged elsewhere)."""
        if frame.cls in (LaneClass.IDLE, LaneClass.PAUSE):
            return NO_LIMIT
        return self._own(frame) + self.raised_ns

    def _own(self, frame: PhaseFrame) -> int:
        if frame.limit_ns > 0:
            return frame.limit_ns
        for table in (self.phases, self.learned):
            if frame.name in table:
                return table[frame.name]
        if frame.cls is LaneClass.START:
            return self.start_ns
        return DEFAULT_PHASE_LIMITS.get(frame.name, self.default_ns)
