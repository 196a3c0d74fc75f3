"""What the supervisor asks of evidence: a seam, so that tests need no process and no py-spy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from stallwatch.evidence.model import ProcessEvidence, Target

Stacks = dict[int, ProcessEvidence]


class StackSampler(Protocol):
    """Looks at all processes of one engine. Every call is bounded and never raises for a target."""

    def first(self, targets: Sequence[Target], *, deadline_s: float = 1.0) -> Stacks:
        """Non-blocking stacks of all targets at one moment, by pid; harms nothing."""
        ...

    def more(
        self,
        targets: Sequence[Target],
        first: Mapping[int, ProcessEvidence],
        *,
        deadline_s: float = 15.0,
        native: bool = True,
        samples: int = 2,
        gap_s: float = 1.0,
    ) -> list[Stacks]:
        """Further looks, oldest first: native frames (where safe), then samples `gap_s` apart."""
        ...

    def gpu(self, *, deadline_s: float = 5.0) -> dict[str, Any]:
        """Device facts; {"available": False, "why": ...} when there is no tool or it hangs."""
        ...

    def cancel(self) -> None:
        """End the gaps of a running `more`; what was taken so far is returned."""
        ...
