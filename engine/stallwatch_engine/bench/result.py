"""How one request ended, and the placeholder for one that did not run to its end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from stallwatch_engine.bench.timeouts import TimeoutKind


class Outcome(StrEnum):
    """Exactly one for each request of a run."""

    COMPLETED = "completed"  # the whole answer came, and the server said so
    TIMED_OUT = "timed_out"  # a structural timeout
    ERROR = "error"  # anything else, a truncated answer included
    CANCELLED = "cancelled"  # in flight or never sent when the run was stopped


@dataclass(frozen=True, slots=True)
class Result:
    """One request. Times in seconds; `due_s` and `sent_s` from the start of the run, the others from `sent_s`.

    sent_s: None when it was never begun. ttft_s: first text; None without streaming. e2e_s: end
    of the answer. itl_mean_s, itl_max_s: gaps between pieces of text. output_tokens: by the
    server's usage, else pieces counted. text_sha256: of the text, for comparing runs. matched:
    whether the expected text was in the answer; None when nothing was expected. failure_id: of
    the supervisor's report.
    """

    index: int
    outcome: Outcome
    due_s: float
    sent_s: float | None = None
    ttft_s: float | None = None
    e2e_s: float | None = None
    itl_mean_s: float | None = None
    itl_max_s: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int = 0
    finish_reason: str | None = None
    status: int | None = None
    timeout: TimeoutKind | None = None
    error: str = ""
    code: str = ""
    failure_id: str | None = None
    text_sha256: str | None = None
    matched: bool | None = None

    @property
    def timed_out(self) -> bool:
        return self.outcome is Outcome.TIMED_OUT

    @property
    def queue_s(self) -> float | None:
        """How long it waited past its due time for a free place: the wait a patient client sees too."""
        return None if self.sent_s is None else max(0.0, self.sent_s - self.due_s)

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first one; None under two tokens."""
        if self.e2e_s is None or self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)


def placeholder(index: int, due_s: float, *, expects: bool) -> Result:
    """The result of a request that was never begun."""
    said = "not sent: the run was stopped before it"
    matched = False if expects else None
    return Result(index, Outcome.CANCELLED, due_s, error=said, matched=matched)
