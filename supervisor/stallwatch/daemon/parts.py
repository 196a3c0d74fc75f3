"""What every runner shares: one of each per daemon."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stallwatch.clock import Clock
from stallwatch.config import Config
from stallwatch.daemon.counters import Totals
from stallwatch.daemon.events import EventRing
from stallwatch.daemon.gateway import GatewayDesk
from stallwatch.evidence.ledger import Ledger
from stallwatch.evidence.tool import ToolRegistry
from stallwatch.lifecycle.states import State
from stallwatch.process.reaper import Reaper
from stallwatch.process.spool import Passthrough
from stallwatch.watch.judge import Judge


@dataclass(slots=True)
class Parts:
    """Built once in daemon.main, handed to each runner."""

    config: Config
    clock: Clock
    state_dir: Path
    ledger: Ledger
    events: EventRing
    totals: Totals
    tools: ToolRegistry
    reaper: Reaper
    judge: Judge
    stderr: Passthrough
    seed: int
    on_state: Callable[[str, State], None]
    desk: GatewayDesk | None = None  # only with a gateway
