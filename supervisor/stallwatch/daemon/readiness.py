"""What keeps an incarnation from READY, and the moment nothing does any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from stallwatch.config import EngineConfig
from stallwatch.process.ready import Foreign, Probe, Ready, all_ready, ask, port_owner
from stallwatch.watch.snapshot import Snapshot

STEP_S = 0.2
YOUNGER_STEP_S = 0.05
LOOK_NS = 20_000_000  # a look reads the board at most this long before its own time
PROBE_STEP_S = 1.0  # each probe is a line in the engine's access log
FIRST_SECOND_S = 1.0


class Starting(Protocol):
    """What is asked of the incarnation. Every method returns at once."""

    def latest(self) -> Snapshot | None: ...
    def members(self) -> object:
        """Living members; empty: it ended."""
        ...

    def age_s(self) -> float: ...
    def pids(self) -> list[int]: ...


@dataclass(slots=True)
class Readiness:
    """`wait` runs in a job; the words are read by status and by reports."""

    engine: Starting
    config: EngineConfig
    became_ready: Callable[[], None]
    say_foreign: Callable[[str], None]
    waits_for: str = "a first look at it"
    foreign: str = ""  # who else answers on the port, in words
    now_ns: Callable[[], int] = time.monotonic_ns

    def wait(self, over: threading.Event) -> None:
        """Until READY (told once), until `over` is set, or until nothing lives.

        The port and the probe answer now; a look may be from before the engine attached. So the
        last word has a look that is younger: who reads READY finds its lanes beside it.
        """
        http, port = self.config.ready.http, self.config.port
        probe = Probe.parse(http, port) if http else None
        pause_s, answered_ns = STEP_S, 0
        while not over.wait(pause_s) and self.engine.members():
            pause_s = STEP_S
            snapshot = self.engine.latest()
            self.waits_for = self._missing(snapshot, port)
            if self.waits_for or snapshot is None:
                answered_ns = 0
                continue
            if probe is not None and not answered_ns and not (answer := ask(probe)).ok:
                self.waits_for = f"{http} to answer (now: {answer.detail})"
                pause_s = PROBE_STEP_S
                continue
            answered_ns = answered_ns or self.now_ns()
            if snapshot.now_ns <= answered_ns + LOOK_NS:
                self.waits_for, pause_s = "a look at what it says now", YOUNGER_STEP_S
                continue
            self.became_ready()
            return

    def _missing(self, snapshot: Snapshot | None, port: int | None) -> str:
        """What is still missing, in words; '' when only the HTTP probe is left to ask."""
        if snapshot is None:
            return "a first look at it"
        said = all_ready(snapshot.image)
        if said is False and snapshot.image is not None:
            silent = [p.address for p in snapshot.image.processes if not (p.ready or p.detached)]
            return f"board.ready() of {', '.join(silent[:4])}"
        if port is not None and not self._listens(port):
            return f"a process of this engine to listen on port {port}"
        # An engine that knows nothing of us and has neither port nor probe: alive for a second is
        # all that READY can mean.
        asks_nothing = said is None and port is None and not self.config.ready.http
        return "its first second to pass" if asks_nothing and self._young() else ""

    def _young(self) -> bool:
        return self.engine.age_s() < FIRST_SECOND_S

    def _listens(self, port: int) -> bool:
        owner = port_owner(port, self.engine.pids())
        words = owner.words if isinstance(owner, Foreign) else ""
        if words and words != self.foreign:
            self.say_foreign(words)
        self.foreign = words
        return isinstance(owner, Ready)
