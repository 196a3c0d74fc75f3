"""What happens to a request from its head to its one answer."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from stallwatch.gateway import errors
from stallwatch.gateway.client import Client
from stallwatch.gateway.errors import Answer
from stallwatch.gateway.exchange import COMPUTING, Budget, End, Exchange, Outcome
from stallwatch.gateway.options import Options
from stallwatch.gateway.replica import LEAVING, Replica
from stallwatch.gateway.router import Router, Suspects

SAME_S = 0.5  # an engine that is still called ready after this did not die
TROUBLED_S = 1.0  # the same for one whose own error may be of a part that died
DECLARED_S = 3.0  # ... and a death is declared within this
FAILURES_KEPT = 64
FLUSH_POLL_S = 0.02
HURRIED_FLUSH_S = 0.5  # after a second signal, for slow clients
JUST_S = 1.0  # a request that was lost sooner than this had only just been sent
_REPEATABLE = frozenset({b"GET", b"HEAD", b"OPTIONS", b"TRACE", b"PUT", b"DELETE"})  # RFC 9110


class Gateway:
    """All clients, all exchanges, all counts. One event loop owns everything in here."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.router = Router(hold_most=options.hold_most)
        self.clients: set[Client] = set()
        self.exchanges: set[Exchange] = set()
        self.totals: Counter[str] = Counter()
        self.repeats: Counter[str] = Counter()  # second attempts, by their reason
        self.lost: Counter[str] = (
            Counter()
        )  # by engine: requests without a byte while others got some
        self.by_failure: dict[str, int] = {}  # answers that carried this failure_id
        self.leaving = False
        self._suspects = Suspects()
        self._budget = Budget()
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_flight = 0
        self._hurried = asyncio.Event()

    def connection(self) -> Client:
        """The protocol of a new client."""
        return Client(
            self._begin,
            self.clients,
            budget=self._budget,
            most=self.options.max_connections,
            leaving=lambda: self.leaving,
        )

    @property
    def in_flight(self) -> int:
        """Requests without a complete answer."""
        return len(self.exchanges)

    def _begin(self, exchange: Exchange) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, exchange: Exchange) -> None:
        counted = exchange.request.method in COMPUTING
        self.totals["requests"] += 1
        if refusal := self._not_admitted(exchange, counted=counted):
            self.totals["refused"] += 1
            exchange.answer(refusal)
            return
        self.exchanges.add(exchange)
        self._in_flight += counted
        try:
            word = await self._attempts(exchange)
        except Exception:  # our own mistake must not become a hanging client
            word = "broken"
            exchange.answer(errors.ours())
            raise
        finally:
            self.totals[word] += 1
            self.exchanges.discard(exchange)
            exchange.forget()
            self._in_flight -= counted

    def _not_admitted(self, exchange: Exchange, *, counted: bool) -> Answer | None:
        if exchange.request.method == b"CONNECT":
            return errors.not_served("CONNECT")
        if self.leaving:
            return errors.unavailable("gateway_stopping", "this gateway is about to end")
        if counted and self._in_flight >= self.options.max_in_flight:
            return errors.overloaded(f"{self._in_flight} requests are in flight already")
        return None

    async def _attempts(self, exchange: Exchange) -> str:
        """Try until there is an answer; the word under which it is counted."""
        without: frozenset[str] = frozenset()
        first: Outcome | None = None  # the end that a second try follows
        until_s = time.monotonic() + self.options.hold
        while True:
            if exchange.ended.done():  # its client left between two attempts
                return self._ended(exchange, exchange.ended.result())
            chosen = await self.router.choose(exchange, without, until_s)
            if chosen is None:
                return self._ended(exchange, exchange.ended.result())
            if isinstance(chosen, Answer):
                if first is not None and first.failure is not None:
                    return self._failed(exchange, first)
                return self._refused(exchange, chosen)
            outcome = await self._attempt(exchange, chosen)
            if outcome.end is End.REFUSED:  # nothing was sent
                without |= {chosen.name}
                if self.router.pick(without) is not None:
                    exchange.again()
                    continue
                known = await self._explained(exchange, chosen, outcome)
                if time.monotonic() < until_s:
                    without = frozenset()
                    exchange.again()
                    continue
                if known.failure is not None and first is None:
                    return self._refused(exchange, errors.stalled(known.failure, begun=False))
                return self._ended(exchange, first or outcome)
            soon = time.monotonic() - exchange.sent_s < JUST_S
            known = await self._cause(exchange, chosen, outcome, repeats=first is None)
            if known.end is End.FAILED and first is None and self._again(exchange):
                first = known
                until_s = time.monotonic() + self.options.hold  # for the next incarnation
                self.repeats["retried"] += 1
                exchange.again()
                continue
            if outcome.end is not End.TOLD:  # else the engine's own words are the answer
                outcome = known
            left = chosen.view.state in LEAVING or chosen.view.incarnation != exchange.incarnation
            moves = left and (soon or self._may_be_doubled(exchange)) and exchange.unheard()
            if outcome.end is End.LOST and moves and first is None:
                first = outcome  # it was asked to stop, and this request came just then
                self.repeats["moved"] += 1
                exchange.again()
                continue
            return self._ended(exchange, outcome)

    async def _attempt(self, exchange: Exchange, replica: Replica) -> Outcome:
        exchange.engine, exchange.incarnation = replica.name, replica.view.incarnation
        replica.exchanges.add(exchange)
        try:
            try:
                upstream = await replica.pool.take()
            except (OSError, TimeoutError) as error:
                return Outcome(End.REFUSED, f"no connection: {str(error) or type(error).__name__}")
            reused = upstream.reused
            while True:
                if exchange.ended.done():
                    upstream.abort()
                    return exchange.ended.result()
                exchange.attach(upstream)
                outcome = await exchange.ended
                again = reused and exchange.unheard() and self._may_be_doubled(exchange)
                if outcome.end is not End.LOST or not again or replica.failing is not None:
                    return outcome
                # It was closed just as it was used: most likely the engine has not read this.
                reused = False
                exchange.again()
                try:
                    upstream = await replica.pool.fresh()
                except (OSError, TimeoutError):
                    return outcome  # it has ended, perhaps of this request: no other may get it
        finally:
            replica.exchanges.discard(exchange)

    def _may_be_doubled(self, exchange: Exchange) -> bool:
        """Does it matter to nobody if an engine has read this request, and gets it once more?"""
        return self.options.retry != "never" or exchange.request.method in _REPEATABLE

    async def _cause(
        self, exchange: Exchange, replica: Replica, outcome: Outcome, *, repeats: bool
    ) -> Outcome:
        """The FAILURE behind an end that the engine left unexplained; where it told of one, only to repeat."""
        asked = outcome.end in (End.LOST, End.TROUBLED)
        told = outcome.end is End.TOLD and repeats and self.options.retry == "before-first-byte"
        return await self._explained(exchange, replica, outcome) if asked or told else outcome

    async def _explained(self, exchange: Exchange, replica: Replica, outcome: Outcome) -> Outcome:
        """The same end with the FAILURE that explains it, if one is declared soon."""
        if not self.router.supervised:
            return outcome
        least = TROUBLED_S if outcome.end is End.TROUBLED else SAME_S
        if exchange.says_stalled():
            least = DECLARED_S
        failure = await replica.explain(exchange.incarnation, at_least_s=least, most_s=DECLARED_S)
        return outcome if failure is None else Outcome(End.FAILED, failure=failure)

    def _again(self, exchange: Exchange) -> bool:
        """May this request, in flight at a FAILURE, be sent once more? Counts it as a suspect."""
        if self.options.retry != "before-first-byte":
            return False
        return self._suspects.note(exchange) == 1 and exchange.may_repeat()

    def _ended(self, exchange: Exchange, outcome: Outcome) -> str:
        """Give the answer that is due, if any."""
        gone = outcome.end is End.CLIENT_GONE
        if gone or outcome.end is End.COMPLETE:
            if exchange.failure_id:  # the engine was first: its answer counts as ours would
                self._count(exchange.failure_id)
                return "failed"
            return "client_gone" if gone and not exchange.saw_end() else "answered"
        if outcome.end is End.FAILED:
            return self._failed(exchange, outcome)
        if outcome.end in (End.TROUBLED, End.TOLD):
            return self._passed_on(exchange)
        if outcome.answer is not None:
            self.lost[exchange.engine] += outcome.answer.code == errors.LOST
            exchange.answer(outcome.answer)
            return outcome.answer.code
        if outcome.end is End.MALFORMED:
            exchange.answer(errors.malformed(exchange.engine, outcome.how))
            return "bad_upstream"
        if outcome.end is End.REFUSED:
            return self._refused(exchange, errors.unavailable("engine_not_ready", outcome.how))
        exchange.answer(errors.broken(exchange.engine, outcome.how))
        return "broken"

    def _passed_on(self, exchange: Exchange) -> str:
        if exchange.client.gone:
            return "client_gone"
        exchange.pass_on()
        if exchange.failure_id:  # its own word counts as ours would
            self._count(exchange.failure_id)
            return "failed"
        return "broken" if exchange.says_stalled() else "answered"

    def _refused(self, exchange: Exchange, answer: Answer) -> str:
        exchange.answer(answer)
        self._note(answer)
        return "refused"

    def _failed(self, exchange: Exchange, outcome: Outcome) -> str:
        assert outcome.failure is not None
        answer = errors.stalled(outcome.failure, begun=True)
        exchange.answer(answer)
        self._note(answer)
        return "failed"

    def _note(self, answer: Answer) -> None:
        if failure_id := answer.extra.get("failure_id"):
            self._count(failure_id)

    def _count(self, failure_id: str) -> None:
        self.by_failure[failure_id] = self.by_failure.pop(failure_id, 0) + 1
        while len(self.by_failure) > FAILURES_KEPT:
            self.by_failure.pop(next(iter(self.by_failure)))

    def hurry(self) -> None:
        """A second signal: what runs may not finish any more."""
        self._hurried.set()

    async def leave(self, grace_s: float) -> None:
        """Take nothing new, finish what runs within `grace_s`, then end the rest explicitly."""
        self.leaving = True
        until_s = time.monotonic() + grace_s
        await self._finished(grace_s)
        if self._hurried.is_set():
            until_s = min(until_s, time.monotonic() + HURRIED_FLUSH_S)
        answer = errors.unavailable("gateway_stopping", "this gateway ends")
        for exchange in list(self.exchanges):
            exchange.end(Outcome(End.ENDED, answer=answer))
        await asyncio.sleep(0)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)
        # Every answer is complete by now, but slow clients have not taken all of theirs.
        while time.monotonic() < until_s and self._unsent():  # noqa: ASYNC110 - has no event
            await asyncio.sleep(FLUSH_POLL_S)
        for client in list(self.clients):
            client.abort()
        for replica in self.router.replicas.values():
            replica.pool.close()

    async def _finished(self, seconds: float) -> None:
        """Until every request has its answer, the time is over, or a second signal comes."""
        if not self._tasks:
            return
        hurried = asyncio.ensure_future(self._hurried.wait())
        finished = asyncio.ensure_future(asyncio.wait(set(self._tasks)))
        try:
            await asyncio.wait(
                {hurried, finished}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            hurried.cancel()
            finished.cancel()

    def _unsent(self) -> bool:
        return any(client.unsent for client in self.clients)
