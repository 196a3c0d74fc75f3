"""One engine as the gateway knows it: what the supervisor said of it, and what runs on it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from stallwatch.gateway.errors import Failure
from stallwatch.gateway.exchange import End, Exchange, Outcome
from stallwatch.gateway.upstream import Pool

LEAVING = frozenset({"draining", "stopping", "stopped"})
STOPPED = "stopped"
FAILED = (
    "failed"  # being ended; or for good, with enforce = "fail" or a policy that restarts nothing
)
GIVEN_UP = frozenset({"exhausted", "unkillable", STOPPED})


@dataclass(frozen=True, slots=True)
class View:
    """The supervisor's word on one engine."""

    state: str
    ready: bool
    incarnation: int
    enforce: str = "restart"
    backoff_s: float = 0.0
    why: str = ""  # of an engine that was given up
    comes_back: bool = True  # of one that failed: it is started again by itself


class Replica:
    """Routing facts of one engine, and its exchanges."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.pool = Pool(address)
        self.view = View("starting", ready=False, incarnation=0)
        self.exchanges: set[Exchange] = set()
        self.failure: Failure | None = None
        self._failed = -1  # the incarnation that it is about
        self._asking: set[asyncio.Future[Failure]] = set()

    @property
    def usable(self) -> bool:
        """New requests may be sent to it. A FAILURE ends that until the next incarnation."""
        view = self.view
        if view.incarnation <= self._failed:
            return False
        # Only observed: the stall is reported, and the clients stay where they are.
        return view.ready or (view.state == "stalled" and view.enforce == "observe")

    @property
    def given_up(self) -> bool:
        """Nobody starts it again by itself: it is nothing to wait for until an operator asks."""
        return self.view.state in GIVEN_UP or (
            self.view.state == FAILED and not self.view.comes_back
        )

    @property
    def failing(self) -> Failure | None:
        """The FAILURE that keeps it out of the rotation; None when something else does."""
        return self.failure if self.view.incarnation <= self._failed else None

    def learn(self, view: View) -> None:
        """The supervisor's word, newest last.

        Incarnations that count from the front again are those of a daemon that lost its state: what
        an earlier one said of their numbers is about others.
        """
        if view.incarnation < self.view.incarnation:
            self.failure, self._failed = None, -1
        self.view = view

    def fail(self, failure: Failure) -> None:
        """End every exchange that was sent to that incarnation, or to one before it.

        After a lost connection the supervisor tells what was missed: a failure of an incarnation
        that is long replaced says nothing against the present one.
        """
        if failure.incarnation <= self._failed:
            return
        self.failure, self._failed = failure, failure.incarnation
        self.pool.close()
        for exchange in list(self.exchanges):
            if exchange.incarnation <= failure.incarnation:
                exchange.end(Outcome(End.FAILED, failure=failure))
        for asking in self._asking:
            if not asking.done():
                asking.set_result(failure)

    async def explain(
        self, incarnation: int, *, at_least_s: float, most_s: float
    ) -> Failure | None:
        """Why a connection to that incarnation ended: a process that died is soon declared.

        None once the supervisor still calls it ready after `at_least_s`, or knows nothing after
        `most_s`.
        """
        if self._failed >= incarnation:
            return self.failure
        asking: asyncio.Future[Failure] = asyncio.get_running_loop().create_future()
        self._asking.add(asking)
        try:
            done, _ = await asyncio.wait({asking}, timeout=at_least_s)
            if not done and not (self.view.state == "ready" or self.view.state in LEAVING):
                done, _ = await asyncio.wait({asking}, timeout=max(0.0, most_s - at_least_s))
            return asking.result() if done else None
        finally:
            self._asking.discard(asking)
