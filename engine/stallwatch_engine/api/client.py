"""The api's side of the engine: requests go to the worker, results come back, the ledger decides.

Everything here runs in the event loop's thread. Each of the ways in which a request can end has one
method, and all of them go through `_settle`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from stallwatch_engine.api import errors
from stallwatch_engine.api.errors import ApiError, FailureRecord
from stallwatch_engine.api.exchange import Exchange
from stallwatch_engine.api.generation import BadOutput, Generation
from stallwatch_engine.api.ledger import Answer, Ledger, NeverOpened, Source
from stallwatch_engine.api.metrics import Metrics
from stallwatch_engine.api.text import TextCodec
from stallwatch_engine.wire import (
    Abort,
    ApiLink,
    Failed,
    PeerBroke,
    PeerBusy,
    PeerGone,
    Ready,
    Sampling,
    Stats,
    Submit,
    Tokens,
    WireError,
)

_log = logging.getLogger("stallwatch.engine")


@dataclass(frozen=True, slots=True)
class Limits:
    """queue: requests that may wait beside those the worker computes at once.

    death_grace_s: how long a supervised api waits, after its worker died, for the supervisor's
    FAILURE, so that clients get its id; then it answers in its own words.
    """

    queue: int = 64
    timeout_s: float = 600.0
    death_grace_s: float = 0.0


class EngineClient:
    """Owns the ledger and the link to the worker."""

    def __init__(self, codec: TextCodec, limits: Limits, metrics: Metrics) -> None:
        self.codec = codec
        self.metrics = metrics
        self.ledger = Ledger()
        self.facts: Ready | None = None
        self.ready = asyncio.Event()
        self.down: ApiError | None = None  # why new requests are refused
        self.failed = False  # for good: worker or engine is lost
        self.all_written = asyncio.Event()  # every answer to a failure of all requests
        self._owed: set[int] = set()
        self._limits = limits
        self._link: ApiLink | None = None
        self._exchanges: dict[int, Exchange] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._closed = False

    async def connect(self, sock: socket.socket) -> None:
        """Talk to the worker over this socket."""
        self._link = await ApiLink.over(sock, self._on_message, self._on_end)

    def close(self) -> None:
        self._closed = True
        if self._link is not None:
            self._link.close()

    # Requests.

    def check_open(self) -> Ready:
        """What the worker can do. ApiError when a new request cannot be taken now."""
        if self.down is not None:
            raise errors.for_new(self.down)
        if self.facts is None:
            raise errors.unavailable("engine_starting", "the engine is still starting")
        room = self.facts.max_num_seqs + self._limits.queue
        if len(self.ledger) >= room:
            raise errors.overloaded(f"{room} requests are waiting already: try again later")
        return self.facts

    def submit(
        self,
        prompt: list[int],
        sampling: Sampling,
        stops: Sequence[str],
        *,
        arrived: float,
        timeout_s: float | None,
        streaming: bool,
    ) -> Exchange:
        """Begin a request that arrived at that time of the loop's clock. ApiError when refused."""
        facts = self.check_open()
        assert self._link is not None
        seconds = self._limits.timeout_s if timeout_s is None else timeout_s
        left = arrived + seconds - asyncio.get_running_loop().time()
        if left <= 0:
            raise errors.deadline(seconds)
        request = self.ledger.open()
        generation = Generation(self.codec, sampling, stops, vocab_size=facts.vocab_size)
        exchange = Exchange(request, generation, prompt_tokens=len(prompt), streaming=streaming)
        self._exchanges[request] = exchange
        try:
            self._link.send(
                Submit(
                    id=request,
                    prompt=prompt,
                    sampling=sampling,
                    deadline_ns=time.monotonic_ns() + int(left * 1e9),
                )
            )
        except WireError as error:
            refusal = _not_sent(error)
            self._settle(request, Answer(Source.WORKER_FAILURE, error=refusal), abort=False)
            raise refusal from error
        self._timers[request] = asyncio.get_running_loop().call_later(
            left, self._overdue, request, seconds
        )
        self.metrics.prompt_tokens.inc(len(prompt))
        self.metrics.waiting.set(len(self.ledger))
        return exchange

    def written(self, exchange: Exchange) -> None:
        """The handler is done with it, one way or another."""
        self.hang_up(exchange)
        self._owed.discard(exchange.id)
        if not self._owed:
            self.all_written.set()

    def hang_up(self, exchange: Exchange, why: str = "the client hung up") -> None:
        """The client is gone or does not read: nobody wants the rest."""
        if exchange.answer is None:
            error = errors.disconnected(why)
            self._settle(exchange.id, Answer(Source.DISCONNECT, error=error))

    # The other ways to an end.

    def declare(self, failure: FailureRecord) -> int:
        """The supervisor's FAILURE. How many clients wait for an answer."""
        waiting = len(self.ledger)
        self.failed = True
        self._lose(Source.BOARD_FAILURE, errors.declared(failure))
        return waiting

    def drain(self) -> None:
        """Take nothing new."""
        if self.down is None:
            self.down = errors.unavailable("draining", "the engine is being stopped")

    def shut_down(self) -> None:
        """End what is left after draining."""
        error = errors.unavailable(
            "shutdown", "the engine was stopped before this answer was complete"
        )
        self._lose(Source.SHUTDOWN, error)

    def worker_died(self, why: str) -> None:
        """The worker's process ended, or its end of the link did. A second call changes nothing."""
        if self.failed:
            return
        self.failed = True
        self.metrics.worker_up.set(0)
        error = errors.stalled(
            f"the engine's worker is gone: {why}", failure_id=None, kind="CHILD_DIED"
        )
        self.down = self.down or error
        _log.error("worker lost: %s; %d requests wait", why, len(self.ledger))
        asyncio.get_running_loop().call_later(
            self._limits.death_grace_s, self._lose, Source.PROCESS_DEATH, error
        )

    def _overdue(self, request: int, seconds: float) -> None:
        self._settle(request, Answer(Source.DEADLINE, error=errors.deadline(seconds)))

    def _lose(self, source: Source, error: ApiError) -> None:
        """End every waiting request; new ones are refused from now on."""
        if self.down is None or source is Source.BOARD_FAILURE:
            self.down = error
        self._owed.update(self.ledger)
        if self._owed:
            self.all_written.clear()
        else:
            self.all_written.set()
        for request in self.ledger:
            self._settle(request, Answer(source, error=error))

    # What the worker says.

    def _on_message(self, message: Tokens | Failed | Ready | Stats) -> None:
        match message:
            case Tokens():
                self._on_tokens(message)
            case Failed(id=None):
                self.failed = True
                self.metrics.worker_up.set(0)
                self._lose(Source.WORKER_FAILURE, _worker_error(message))
            case Failed(id=int(request)):
                self._on_failed(request, message)
            case Stats():
                self.metrics.worker(message)
            case Ready():
                if self.facts is not None:
                    raise PeerBroke("the worker said twice that it is ready")
                self.facts = message
                self.metrics.worker_up.set(1)
                self.ready.set()

    def _on_tokens(self, message: Tokens) -> None:
        if not self._wanted(message.id, Source.OUTPUT):
            return
        exchange = self._exchanges[message.id]
        generation = exchange.generation
        try:
            delta = generation.feed(message)
        except BadOutput as error:
            answer = errors.internal(f"the worker's output is not usable: {error}")
            self._settle(message.id, Answer(Source.WORKER_FAILURE, error=answer))
            return
        self.metrics.tokens.inc(delta.tokens)
        first = exchange.first_token_s is None
        exchange.put(delta)
        if first and exchange.first_token_s is not None:
            self.metrics.first_token.observe(exchange.first_token_s)
        if generation.finish is not None:
            answer_ = Answer(Source.OUTPUT, finish=generation.finish)
            self._settle(message.id, answer_, abort=message.finish is None)
        elif exchange.overflows:
            self.hang_up(exchange, "the client reads slower than its answer is made")

    def _on_failed(self, request: int, message: Failed) -> None:
        if self._wanted(request, Source.WORKER_FAILURE):
            source = Source.DEADLINE if message.reason == "deadline" else Source.WORKER_FAILURE
            self._settle(request, Answer(source, error=_worker_error(message)), abort=False)

    def _wanted(self, request: int, source: Source) -> bool:
        """False for a late result, which is counted. PeerBroke for an id that nobody ever had."""
        if self.ledger.is_waiting(request):
            return True
        try:
            self.ledger.drop(request, source)
        except NeverOpened as error:
            raise PeerBroke(str(error)) from None
        self.metrics.late.labels(source.value).inc()
        return False

    def _on_end(self, reason: WireError) -> None:
        if not self._closed:  # else this side ended the link, and nobody was lost
            self.worker_died(str(reason))

    def _settle(self, request: int, answer: Answer, *, abort: bool = True) -> None:
        """The compare-and-set. Whoever loses here has been counted by the ledger."""
        if not self.ledger.settle(request, answer.source):
            self.metrics.late.labels(answer.source.value).inc()
            return
        exchange = self._exchanges.pop(request)
        timer = self._timers.pop(request, None)
        if timer is not None:
            timer.cancel()
        self.metrics.settled.labels(answer.source.value).inc()
        self.metrics.waiting.set(len(self.ledger))
        self.metrics.duration.observe(asyncio.get_running_loop().time() - exchange.began)
        if abort and not self.failed and self._link is not None:
            try:
                self._link.send(Abort(id=request))
            except PeerGone:  # then it holds nothing any more
                pass
        exchange.settle(answer)


def _not_sent(error: WireError) -> ApiError:
    if isinstance(error, PeerBusy):
        return errors.overloaded(f"{error}: try again later")
    return errors.for_new(errors.stalled(str(error), failure_id=None, kind="CHILD_DIED"))


def _worker_error(message: Failed) -> ApiError:
    text = message.message
    match message.reason:
        case "nan_logits":
            return errors.nan_logits()
        case "overload":
            return errors.overloaded(text or "the worker has no room: try again later")
        case "too_long":
            return errors.refused(
                text or "too long for this engine", None, "context_length_exceeded"
            )
        case "deadline":
            return errors.ApiError(
                504,
                "deadline_exceeded",
                text or "no complete answer in time",
                type_="timeout_error",
                retry=False,
            )
        case "stalled":
            return errors.stalled(
                text or "the worker stalled", failure_id=None, kind=message.kind or "UNKNOWN_STALL"
            )
        case "internal":
            return errors.internal(text or "the worker could not compute this request")
