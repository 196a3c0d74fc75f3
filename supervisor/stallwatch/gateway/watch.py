"""The gateway's own watch over requests: bytes to clients are the only thing that it believes.

An engine may call itself well while its clients get nothing. A request without a byte for longer
than its limit is told to the supervisor if nobody else of that engine gets bytes either; if others
do, here or past this gateway as the supervisor knows, this one is lost, and it is answered here, as
all are while there is no supervisor.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from stallwatch.gateway import errors
from stallwatch.gateway.client import HEAD_S, IDLE_S
from stallwatch.gateway.exchange import End, Exchange, Outcome
from stallwatch.gateway.gateway import Gateway
from stallwatch.gateway.options import Options
from stallwatch.gateway.replica import Replica

TICK_S = 0.1
FLOWING_S = 10.0  # others of the same engine got bytes within this
TOLD_FROM = 0.4  # of the limit: the rules warn at half of it
MOST_TOLD = 16
TOLD_S = 3.0  # the supervisor's word on others holds for so long


@dataclass(frozen=True, slots=True)
class Silence:
    """The longest silent request of one engine, for the rules of the supervisor."""

    engine: str
    incarnation: int
    request: str  # a digest: no word of a prompt leaves the gateway
    phase: str
    since_s: float  # CLOCK_MONOTONIC
    limit_s: float
    waiting: int

    def as_dict(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "incarnation": self.incarnation,
            "request": self.request,
            "phase": self.phase,
            "since_ns": int(self.since_s * 1e9),
            "limit_ns": int(self.limit_s * 1e9),
            "waiting": self.waiting,
        }


def phase_of(exchange: Exchange, options: Options) -> tuple[str, float]:
    """What this request waits for, and for how long it may; 0.0: without limit."""
    if exchange.tunnel or exchange.held_back_s:
        return "client", 0.0  # the client's turn
    if not exchange.request.framing.done:
        # Paused, because the engine takes no more of the body: then it is the engine's turn.
        return ("body", options.first_token) if exchange.client.paused else ("client", 0.0)
    if not exchange.streams():
        return "whole_answer", options.whole_answer
    if not exchange.heard:
        return "first_token", options.first_token
    return "between_tokens", options.between_tokens


def silences(gateway: Gateway, now_s: float, serving: Collection[str] = ()) -> Iterator[Silence]:
    """One for each engine of which nobody hears; requests lost among others are ended here."""
    for gone in list(gateway.router.departed):  # of these nobody will declare a failure
        _longest(gone, gateway.options, now_s, alone=True)
        if not gone.exchanges:
            gateway.router.departed.remove(gone)
    for replica in gateway.router.replicas.values():
        alone = not gateway.router.supervised
        others = replica.name in serving
        told = _longest(replica, gateway.options, now_s, alone=alone, others=others)
        if told is not None and told[0] >= TOLD_FROM:
            _, exchange, phase, limit_s = told
            yield Silence(
                engine=replica.name,
                incarnation=exchange.incarnation,
                request=f"{id(exchange):x}:{_digest(exchange)}",
                phase=phase,
                since_s=exchange.last_s,
                limit_s=limit_s,
                waiting=len(replica.exchanges),
            )


def _longest(
    replica: Replica, options: Options, now_s: float, *, alone: bool, others: bool = False
) -> tuple[float, Exchange, str, float] | None:
    flowing = now_s - replica.pool.last_s < FLOWING_S
    found: tuple[float, Exchange, str, float] | None = None
    for exchange in list(replica.exchanges):
        phase, limit_s = phase_of(exchange, options)
        if limit_s <= 0:
            continue
        share = (now_s - exchange.last_s) / limit_s
        if alone and share >= 1:  # nobody else will end it
            exchange.end(Outcome(End.ENDED, answer=errors.silent(limit_s)))
        elif flowing and replica.pool.last_s > exchange.last_s:
            if share >= 1:
                exchange.end(Outcome(End.ENDED, answer=errors.lost(limit_s)))
        elif others and share >= 1:
            exchange.end(Outcome(End.ENDED, answer=errors.lost(limit_s)))
        elif found is None or share > found[0]:
            found = (share, exchange, phase, limit_s)
    return found


def _digest(exchange: Exchange) -> str:
    return hashlib.sha256(b"".join(exchange.kept or ())).hexdigest()[:12]


class Watch:
    """Ten looks a second at every exchange and every connection."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.silent: tuple[Silence, ...] = ()
        self.changed = asyncio.Event()
        self._serving: tuple[float, frozenset[str]] = (0.0, frozenset())

    def told(self, serving: Collection[str]) -> None:
        """The supervisor names the engines that serve others than our clients."""
        self._serving = (time.monotonic(), frozenset(serving))

    def turn(self) -> None:
        """One look."""
        gateway, now = self._gateway, time.monotonic()
        for exchange in list(gateway.exchanges):
            self._deadlines(exchange, now)
        before = self.silent
        told_s, serving = self._serving
        known = serving if now - told_s < TOLD_S else ()
        # The nearest to its limit first: there may be more than are told.
        found = sorted(silences(gateway, now, known), key=lambda s: s.since_s + s.limit_s)
        self.silent = tuple(found[:MOST_TOLD])
        if self.silent != before:
            self.changed.set()
        for replica in gateway.router.replicas.values():
            replica.pool.sweep()
        gateway.router.release()
        for client in list(gateway.clients):
            limit = HEAD_S if client.reading_head else IDLE_S
            if client.exchange is None and now - client.since_s > limit:
                client.abort()

    def _deadlines(self, exchange: Exchange, now_s: float) -> None:
        options = self._gateway.options
        limits = [s for s in (options.deadline, exchange.request.seconds or 0.0) if s > 0]
        if limits and now_s - exchange.began_s > min(limits):
            exchange.end(Outcome(End.ENDED, answer=errors.deadline(min(limits))))
        slow = options.slow_client
        if slow > 0 and exchange.held_back_s and now_s - exchange.held_back_s > slow:
            exchange.client.abort()
        sending = not (exchange.request.framing.done or exchange.tunnel or exchange.client.paused)
        if slow > 0 and sending and now_s - exchange.fed_s > slow:
            exchange.end(Outcome(End.ENDED, answer=errors.body_late(slow)))
