"""The accused, as the selection knows it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stallwatch.board.image import LaneImage
from stallwatch.diagnosis.kinds import Kind
from stallwatch.watch.snapshot import Exit


@dataclass(frozen=True, slots=True)
class Suspect:
    """The accused and why. `kind` is set when the selection itself proved it."""

    pid: int = 0
    start_ticks: int = 0
    process: str = ""
    role: str = ""
    rank: int = 0
    lane: LaneImage | None = None
    phase: str = ""
    kind: Kind | None = None
    exit: Exit | None = None
    path: tuple[str, ...] = ()  # from the finding's lane to the root
    cycle: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    hints: tuple[Kind, ...] = ()  # kinds that stay possible besides UNKNOWN_STALL
    odd: bool = False  # the one rank that differs from its gang
    remote: str = ""  # the chain of waits ends outside this engine, there

    def because(self, *reasons: str) -> Suspect:
        return replace(self, reasons=(*self.reasons, *(r for r in reasons if r)))
