"""The FAILURE record: the one sentence that every waiting client gets. Standard library only."""

from __future__ import annotations

from typing import Any, NamedTuple


class Failure(NamedTuple):
    """A declared failure of one incarnation. Clients see `id` as failure_id."""

    id: str  # st-20261130T031502Z-9f2c41aa
    engine: str
    incarnation: int
    kind: str
    culprit: str  # lane or process address, "" when unknown
    phase: str
    elapsed_s: float
    limit_s: float
    action: str  # observe, alert, fail, restart

    def as_dict(self) -> dict[str, Any]:
        """The record as JSON-ready keys, in the order of the fields."""
        return self._asdict()

    def sentence(self) -> str:
        """One line for a person or a client."""
        who = f" in {self.culprit}" if self.culprit else ""
        phase = f", phase {self.phase}" if self.phase else ""
        return f"engine {self.engine} failed: {self.kind}{who}{phase}{self._time()} [{self.id}]"

    def _time(self) -> str:
        """How long, and which limit: only a phase's own goes without a word."""
        if self.limit_s <= 0:
            return f" ({self.elapsed_s:.1f} s)" if self.elapsed_s > 0 else ""
        took, limit = f"{self.elapsed_s:.1f} s", f"{self.limit_s:.1f} s"
        if self.kind == "PROCESS_STOPPED" and self.limit_s < 1:
            return f" (stopped for {took})"  # found by its own rule: no phase has such a limit
        if self.kind == "SHUTDOWN_HANG":
            return f" ({took} after the stop was asked for, grace {limit})"
        return f" ({took}, limit {limit})"
