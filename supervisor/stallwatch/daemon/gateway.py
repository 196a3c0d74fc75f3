"""The gateway as one more process tree: how it is started, and what it is heard to say.

It is supervised exactly as an engine is, by a runner of its own: its event loop is a lane, a blocked
one is a stall with a report, and it is killed and started again.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from stallwatch.board.image import BoardImage
from stallwatch.clock import Clock, nanoseconds
from stallwatch.config import EngineConfig, GatewayConfig
from stallwatch.config.model import RestartConfig
from stallwatch.control.gateway import GatewayReport
from stallwatch.daemon.gateway_past import Past
from stallwatch.process.kill import kill
from stallwatch.process.members import Membership
from stallwatch.process.reaper import Owned
from stallwatch.watch.limits import LONGEST_S
from stallwatch.watch.snapshot import Silence

LOOP_S = 5.0
FAREWELL_S = 3.0  # half a second for what an engine's end explains, and what slow clients take
MOST_GATEWAYS = 16
SAME_CLOCK_NS = nanoseconds(5.0)  # a report takes less than this to come
STALE_NS = nanoseconds(3.0)  # a gateway that says nothing for so long has nothing to say
SERVING_NS = nanoseconds(10.0)  # an engine did something for others within this
_SOON = RestartConfig.model_construct(
    policy="always", budget=100, window=1800.0, backoff=(0.1, 1.0, 5.0), backoff_cap=5.0
)


def as_engine(gateway: GatewayConfig, socket_path: str) -> EngineConfig:
    """The gateway's process as the supervisor starts and judges it."""
    command = (
        sys.executable, "-m", "stallwatch.cli.main", "gateway",
        "--socket", socket_path, *gateway.flags(),
    )  # fmt: skip
    return EngineConfig.model_construct(
        command=command,
        port=gateway.port,
        # Slow is not stuck, and under "always" even a mere decay would end every client's stream.
        limits={"loop": LOOP_S, "degraded": LONGEST_S},
        restart=_SOON,
        # At SIGTERM it takes nothing new and finishes what runs: no drain from outside.
        drain=0.0,
        stop_grace=gateway.drain + LOOP_S,
        plugin="off",
    )


def farewell(tree: Membership) -> None:
    """At a daemon's second signal: the gateway ends each client's request in words, then it is killed.

    Two different signals, for two of one sort may arrive as one: it leaves at the first that it
    gets, and at once at the second. Engines are being killed meanwhile, which its clients are told.
    """
    for pid in list(tree.members()):
        for number in (signal.SIGTERM, signal.SIGINT):
            tree.signal(pid, number)
    until = time.monotonic() + FAREWELL_S
    while tree.members() and time.monotonic() < until:
        time.sleep(0.05)
    kill(tree)


class Foreign:
    """Processes that are no members of an engine although the daemon is their parent: our tools
    and the gateway. An engine that takes orphans in would take the gateway, and kill it.
    """

    def __init__(self, tools: Owned, desk: GatewayDesk | None) -> None:
        self._tools = tools
        self._desk = desk

    def pids(self) -> frozenset[int]:
        """All of them, now."""
        gateway = self._desk.processes() if self._desk is not None else ()
        return frozenset(self._tools.pids()) | frozenset(gateway)


@dataclass(frozen=True, slots=True)
class _Heard:
    """The last report of one gateway."""

    at_ns: int
    shift_ns: int  # from its clock to ours; 0: the same machine's
    said: Mapping[str, Any]
    silent: Mapping[tuple[str, int], Silence]
    bytes_ns: Mapping[str, int]  # when an engine last sent a byte to a client of this gateway
    held: Mapping[str, int]  # requests by engine, at this report or the one before


class GatewayDesk:
    """The last report of each gateway, and from them the silence of each engine. Safe from any thread.

    There may be several, and clients that come past all of them: each speaks of its own clients only.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._heard: Mapping[str, _Heard] = {}  # by source; replaced, never changed
        self._last = ""
        self._past: dict[str, Past] = {}  # by engine; written by the judging thread
        self.processes: Callable[[], Collection[int]] = tuple  # of the gateway, if it is ours
        self.lost: Callable[[str, int], None] = lambda _engine, _count: None

    def heard(self, report: GatewayReport) -> Collection[str]:
        """A report came. One from the future, or about nothing that runs, says nothing.

        Returns the engines that serve others than the clients of this gateway.
        """
        now = self._clock.monotonic_ns()
        with self._lock:
            known = {k: h for k, h in self._heard.items() if now - h.at_ns <= STALE_NS}
            old = known.pop(report.source, None)
            if len(known) >= MOST_GATEWAYS:
                return ()
            # Kept while it speaks: a moment that came a little later each time would never settle.
            shift = old.shift_ns if old is not None else _shift(report.now_ns, now)
            silent = {
                (s.engine, s.incarnation): Silence(
                    s.request, s.phase, s.since_ns + shift, s.limit_ns, max(1, s.waiting)
                )
                for s in report.silent
                if 0 <= s.since_ns + shift <= now
            }
            before = old.said.get("replicas", {}) if old is not None else {}
            held = {n: max(k, before.get(n, 0)) for n, k in report.replicas.items()}
            sent = {n: min(at + shift, now) for n, at in report.bytes_ns.items()}
            fresh = _Heard(now, shift, report.model_dump(), silent, sent, before | held)
            self._heard = {**known, report.source: fresh}
            self._last = report.source
        if old is not None:  # what it counted before we knew it is old news
            self._tell_lost(old.said.get("lost", {}), report.lost)
        return self._serving(report.source, now)

    def _tell_lost(self, before: Mapping[str, int], after: Mapping[str, int]) -> None:
        for engine, count in after.items():
            if count > before.get(engine, 0):
                self.lost(engine, count - before.get(engine, 0))

    def _serving(self, source: str, now_ns: int) -> Collection[str]:
        found = {n: past.served_ns for n, past in list(self._past.items())}
        for other, heard in self._heard.items():
            if other != source and now_ns - heard.at_ns <= STALE_NS:
                found |= {n: max(at, found.get(n, 0)) for n, at in heard.bytes_ns.items()}
        return sorted(n for n, at in found.items() if at and now_ns - at < SERVING_NS)

    def silence(
        self,
        engine: str,
        incarnation: int,
        image: Callable[[], BoardImage | None] = lambda: None,
    ) -> Silence | None:
        """What clients of this incarnation wait for in vain; from the judging thread, without a lock.

        Of several gateways' silences the one that is nearest to its end, and when the engine last
        served somebody else: another gateway's client, or one that came past all gateways.
        """
        fresh = self._fresh()
        told = [(s, h) for h in fresh if (s := h.silent.get((engine, incarnation))) is not None]
        if not told:
            self._past.pop(engine, None)
            return None
        first, teller = min(told, key=lambda t: (t[0].since_ns + t[0].limit_ns, t[0].request))
        past = self._past.get(engine)
        if past is None or past.incarnation != incarnation:
            past = self._past[engine] = Past(incarnation)
        if (seen := image()) is not None:
            known = sum(h.held.get(engine, 0) for h in fresh)
            past.look(seen, self._clock.monotonic_ns(), known)
        others = past.served_ns
        for heard in fresh:
            if heard is not teller:
                others = max(others, heard.bytes_ns.get(engine, 0))
        return replace(first, others_ns=others) if others > first.since_ns else first

    def owes(self, engine: str, since_ns: int) -> bool:
        """Clients of a gateway still wait for this engine, as far as it said after `since_ns`.

        Until it has said so: they do. A gateway that says nothing any more owes nobody anything.
        """
        return any(
            h.at_ns < since_ns or h.said.get("replicas", {}).get(engine, 0) > 0
            for h in self._fresh()
        )

    def holds(self, engine: str) -> int:
        """Requests of this engine that gateways held when they last spoke, or the time before."""
        return sum(h.held.get(engine, 0) for h in self._fresh())

    def told(self, engine: str, failure_id: str, since_ns: int) -> int:
        """Answers that carried this FAILURE; 0 as long as a gateway has not said all since then."""
        if self.owes(engine, since_ns):
            return 0
        return sum(h.said.get("failures", {}).get(failure_id, 0) for h in self._fresh())

    def _fresh(self) -> list[_Heard]:
        now = self._clock.monotonic_ns()
        return [h for h in self._heard.values() if now - h.at_ns <= STALE_NS]

    def view(self) -> Mapping[str, Any]:
        """The last report and its age."""
        with self._lock:
            last = self._heard.get(self._last)
        if last is None:
            return {"age_s": None}
        return {**last.said, "age_s": (self._clock.monotonic_ns() - last.at_ns) / 1e9}


def _shift(theirs_ns: int, ours_ns: int) -> int:
    """From a gateway's clock to ours: 0 on one machine, where both are one clock."""
    shift = ours_ns - theirs_ns if theirs_ns else 0
    return shift if abs(shift) > SAME_CLOCK_NS else 0
