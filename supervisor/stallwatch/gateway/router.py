"""Which replica gets a request, and what is said when none can: least loaded, first in first out."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Any

from stallwatch.gateway.errors import Answer, Failure, given_up, stalled, unavailable
from stallwatch.gateway.exchange import Exchange
from stallwatch.gateway.replica import STOPPED, Replica, View

RELEASED_AT_ONCE = 64  # of those who waited: an engine that is just ready is not flooded
REMEMBERED = 4096
SUPERVISOR_S = 5


class Suspects:
    """Requests that were in flight at a FAILURE, by digest. Bounded."""

    def __init__(self) -> None:
        self._seen: OrderedDict[bytes, int] = OrderedDict()

    def note(self, exchange: Exchange) -> int:
        """Count one FAILURE against it; how many there are now. 0: its body was not kept."""
        if exchange.kept is None:
            return 0
        body = hashlib.sha256(exchange.request.path)
        for part in exchange.kept:
            body.update(part)
        key = body.digest()
        self._seen[key] = count = self._seen.pop(key, 0) + 1
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        return count


class Router:
    """What is known of all replicas, and the line of those who wait for one."""

    def __init__(self, *, hold_most: int = 256) -> None:
        self.replicas: dict[str, Replica] = {}
        self.departed: list[Replica] = []  # named by nobody any more, with requests that run on
        self.supervised = False  # somebody tells us about the replicas
        self._hold_most = hold_most
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """Requests that are held until a replica is ready."""
        return len(self._waiting)

    # -- from the supervisor -------------------------------------------------------------------

    def learn(self, views: Mapping[str, tuple[str, View]]) -> None:
        """Every engine with its address; those not named any more leave."""
        self.supervised = True
        for name, (address, view) in views.items():
            known = self.replicas.get(name)
            if known is None:
                known = self.replicas[name] = Replica(name, address)
            elif known.pool.address != address:  # what runs there is still this engine's
                known.pool.move(address)
            known.learn(view)
        for name in set(self.replicas) - set(views):
            gone = self.replicas.pop(name)
            gone.learn(View("stopped", ready=False, incarnation=0))
            gone.pool.move("")
            self.departed.append(gone)
        self.release()

    def fail(self, name: str, failure: Failure) -> None:
        """A FAILURE was declared."""
        replica = self.replicas.get(name)
        if replica is not None:
            replica.fail(failure)

    def orphaned(self) -> None:
        """No supervisor: nothing is known of any replica."""
        self.supervised = False

    # -- for a request -------------------------------------------------------------------------

    def pick(self, without: frozenset[str] = frozenset()) -> Replica | None:
        """The least loaded one; a suspect only when nobody else is left."""
        if not self.supervised:
            return None
        usable = [r for r in self.replicas.values() if r.usable and r.name not in without]
        return min(
            usable,
            key=lambda r: (r.view.state != "ready", len(r.exchanges), r.pool.last_s),
            default=None,
        )

    async def choose(
        self, exchange: Exchange, without: frozenset[str], until_s: float
    ) -> Replica | Answer | None:
        """A replica, or the refusal; waits until then if somebody is about to be ready.

        None: the exchange ended while it waited.
        """
        found = None if self._waiting else self.pick(without)
        while found is None:
            left = until_s - time.monotonic()
            if left <= 0 or not self._worth_waiting():
                return self.refusal()
            if len(self._waiting) >= self._hold_most:
                return unavailable("gateway_full", f"{self._hold_most} requests wait already")
            if not await self._turn(exchange, left):
                return None if exchange.ended.done() else self.refusal()
            found = self.pick()
        return found

    async def _turn(self, exchange: Exchange, seconds: float) -> bool:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            either: set[asyncio.Future[Any]] = {turn, exchange.ended}
            await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if turn in self._waiting:
                self._waiting.remove(turn)
        return turn.done() and not exchange.ended.done()

    def release(self) -> None:
        """Somebody can serve: let those who wait go, oldest first. Nobody ever will: let all go, to be told."""
        hopeless = not self._worth_waiting()
        for _ in range(len(self._waiting) if hopeless else RELEASED_AT_ONCE):
            if not self._waiting or not (hopeless or self.pick() is not None):
                return
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)

    def _worth_waiting(self) -> bool:
        if not self.supervised:
            return True
        return any(not r.given_up for r in self.replicas.values())

    def _spent(self) -> Replica | None:
        """One that the supervisor gave up, rather one whose FAILURE is known."""
        known = self.replicas.values()
        spent = [r for r in known if r.given_up and r.view.state != STOPPED]
        return min(spent, key=lambda r: r.failing is None, default=None)

    def refusal(self) -> Answer:
        """Why nobody serves: the sentence, and when to come again."""
        if not self.supervised:
            text = "no supervisor answers: the state of the engines is not known"
            return unavailable("no_supervisor", text, retry_after_s=SUPERVISOR_S)
        if not self.replicas:
            return unavailable("no_engine", "no engine is configured for this gateway")
        if not self._worth_waiting() and (spent := self._spent()):
            words = spent.view.why or f"its state is {spent.view.state}"
            return given_up(spent.name, words, spent.failing)
        for replica in self.replicas.values():
            if (failure := replica.failing) is not None:
                return stalled(failure, begun=False)
        said = ", ".join(f"{r.name} is {r.view.state}" for r in self.replicas.values())
        wait = min(
            (r.view.backoff_s for r in self.replicas.values() if r.view.backoff_s), default=1
        )
        return unavailable("engine_not_ready", f"no engine can serve: {said}", retry_after_s=wait)
