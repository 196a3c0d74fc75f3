"""Continuous batching with chunked prefill, in order of arrival, running ahead of what is known.

Invariants, each tested on random histories:
- everything that runs arrived before everything that waits;
- the oldest running request can always go on: younger ones are preempted for its pages;
- a page or slot belongs to one request, to the quarantine, or to the pool;
- at most `max_in_flight` steps are out, and they retire in order.

A preempted request begins again at position 0 with the tokens it has: recurrent states have no rollback.
The sampler is a function of seed and count, so the tokens that follow are those it would have had.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from stallwatch_engine.schedule.errors import QueueFull, RequestRefused, RequestTooLong
from stallwatch_engine.schedule.limits import Limits
from stallwatch_engine.schedule.plan import (
    ON_DEVICE,
    Feed,
    PlanBuilder,
    Sample,
    StepPlan,
    Update,
)
from stallwatch_engine.schedule.request import Finish, Request, RequestId, RequestSpec
from stallwatch_engine.state.pages import NULL, IndexPool, PageWrite
from stallwatch_engine.state.quarantine import Lease, Quarantine


@dataclass(frozen=True, slots=True)
class Load:
    """The scheduler at one moment. `preemptions` and `overrun` (samples discarded) count from the start."""

    waiting: int
    running: int
    in_flight: int
    free_pages: int
    free_slots: int
    quarantined_pages: int
    preemptions: int
    overrun: int


@dataclass(frozen=True, slots=True)
class _InFlight:
    step: int
    rows: tuple[Request, ...]
    sampled: tuple[Request, ...]


class Scheduler:
    """Not thread-safe: one thread calls it."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # by arrival, oldest first
        self._live: dict[RequestId, Request] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._pages = IndexPool("pages", limits.pages)
        self._slots = IndexPool("slots", limits.slots)
        self._quarantine = Quarantine()
        self._next_step = 0
        self._preemptions = 0
        self._overrun = 0

    @property
    def load(self) -> Load:
        """What is waiting, running and held."""
        return Load(
            waiting=len(self._waiting),
            running=len(self._running),
            in_flight=len(self._in_flight),
            free_pages=self._pages.free,
            free_slots=self._slots.free,
            quarantined_pages=self._quarantine.pages,
            preemptions=self._preemptions,
            overrun=self._overrun,
        )

    @property
    def unfinished(self) -> int:
        """Requests without an end. Zero with steps in flight: only overrun is being computed."""
        return len(self._live)

    def add(self, spec: RequestSpec) -> None:
        """Queue a request. Raises RequestRefused (RequestTooLong, QueueFull)."""
        if spec.id in self._live:
            raise RequestRefused(spec.id, "the id is in use")
        if not spec.prompt or spec.max_tokens < 1:
            raise RequestRefused(spec.id, "needs a prompt and a max_tokens of at least 1")
        tokens = len(spec.prompt) + spec.max_tokens
        if tokens > self.limits.capacity:
            raise RequestTooLong(spec.id, tokens=tokens, capacity=self.limits.capacity)
        if len(self._waiting) >= self.limits.max_waiting:
            raise QueueFull(spec.id, waiting=len(self._waiting))
        request = Request(spec)
        self._live[spec.id] = request
        self._waiting.append(request)

    def end(self, request_id: RequestId, finish: Finish = Finish.ABORT) -> bool:
        """End a request from outside: abort, deadline, a stop string. False if it has ended already."""
        request = self._live.get(request_id)
        if request is None:
            return False
        self._end(request, finish)
        return True

    def schedule(self) -> StepPlan | None:
        """The next step, or None: nothing to do, nothing possible before a step retires, or enough in flight."""
        if len(self._in_flight) >= self.limits.max_in_flight:
            return None
        builder = PlanBuilder(self._next_step, self.limits.token_budget)
        planned: list[Request] = []
        sampled: list[Request] = []
        self._plan_running(builder, planned, sampled)
        self._plan_waiting(builder, planned, sampled)
        if not planned:
            return None
        self._in_flight.append(_InFlight(builder.step, tuple(planned), tuple(sampled)))
        self._next_step += 1
        return builder.build()

    def retire(
        self, step: int, ids: Sequence[int], failed: Collection[int] = frozenset()
    ) -> tuple[Update, ...]:
        """The oldest step in flight has ended with one id for each of its samples, in their order.

        `failed` holds the numbers of samples whose logits were not finite: those requests end, no others.
        Raises ValueError for another step or another number of ids: results must not be misattributed.
        """
        if not self._in_flight or self._in_flight[0].step != step:
            raise ValueError(f"step {step} is not the oldest in flight")
        flown = self._in_flight[0]
        if len(ids) != len(flown.sampled):
            raise ValueError(f"step {step} has {len(flown.sampled)} samples, got {len(ids)} ids")
        self._in_flight.popleft()
        for request in flown.rows:
            request.steps.discard(step)
        for lease in self._quarantine.retire(step):
            self._free(lease)
        updates = (
            self._receive(request, token, bad=number in failed)
            for number, (request, token) in enumerate(zip(flown.sampled, ids, strict=True))
        )
        return tuple(update for update in updates if update is not None)

    def _receive(self, request: Request, token: int, *, bad: bool) -> Update | None:
        if request.finish is not None:
            self._overrun += 1  # sampled after the end, before the end was known
            return None
        request.pending -= 1
        if bad:
            self._end(request, Finish.ERROR)
            return Update(request.spec.id, None, Finish.ERROR)
        request.outputs.append(token)
        if token in request.spec.stop_ids:
            self._end(request, Finish.STOP)
        elif len(request.outputs) == request.spec.max_tokens:
            self._end(request, Finish.LENGTH)
        return Update(request.spec.id, token, request.finish)

    def _plan_running(
        self, builder: PlanBuilder, planned: list[Request], sampled: list[Request]
    ) -> None:
        """Plan those that run, oldest first, until pages run short.

        The budget cannot: each was admitted when those before it left room for its share, and shares only
        shrink, from a chunk to the last piece of a prompt to one token.
        """
        position = 0
        while position < len(self._running):  # preemption shortens the list at its end
            request = self._running[position]
            position += 1
            many = self._share(request, builder.budget)
            if not many:
                continue
            need = self.limits.pages_for(request.scheduled + many) - len(request.pages)
            if need > 0 and not self._make_room(request, need):
                return
            self._give_pages(request, need, builder)
            self._plan(request, many, builder, sampled)
            planned.append(request)

    def _plan_waiting(
        self, builder: PlanBuilder, planned: list[Request], sampled: list[Request]
    ) -> None:
        """Admit from the head of the queue; whoever cannot start keeps everyone behind waiting."""
        while self._waiting and len(self._running) < self.limits.max_seqs and self._slots.free:
            request = self._waiting[0]
            many = self._share(request, builder.budget)
            need = self.limits.pages_for(request.known)
            # a page more for each that runs: else it would be preempted at their next page
            if not many or request.pending or need + len(self._running) > self._pages.free:
                return
            self._waiting.popleft()
            self._running.append(request)
            (request.slot,) = self._slots.take()
            builder.fresh.append(request.slot)
            self._give_pages(request, need, builder)
            self._plan(request, many, builder, sampled)
            planned.append(request)

    def _share(self, request: Request, budget: int) -> int:
        """Tokens that the request gets of what is left."""
        wanted = request.wanted
        if not self.limits.chunked:
            return wanted if wanted <= budget else 0
        return min(wanted, budget, self.limits.chunk)

    def _plan(
        self, request: Request, many: int, builder: PlanBuilder, sampled: list[Request]
    ) -> None:
        first = request.scheduled
        ids = request.ids(first, first + many)
        if len(ids) < many:  # the newest token exists on the device alone
            assert request.source is not None
            assert many == 1
            builder.feeds.append(Feed(len(builder.ids), *request.source))
            ids = (ON_DEVICE,)
        row = builder.add(request.spec.id, request.slot, ids, first)
        request.scheduled += many
        request.steps.add(builder.step)
        if request.scheduled < request.length:
            return
        count = len(request.outputs) + request.pending
        request.source = builder.step, len(builder.samples)
        request.pending += 1
        builder.samples.append(Sample(row, request.spec.id, count, request.spec.params))
        sampled.append(request)

    def _give_pages(self, request: Request, need: int, builder: PlanBuilder) -> None:
        if need <= 0:
            return
        start = len(request.pages)
        pages = self._pages.take(need)
        request.pages += pages
        builder.page_writes += [
            PageWrite(request.slot, start + place, page) for place, page in enumerate(pages)
        ]

    def _make_room(self, request: Request, need: int) -> bool:
        """Preempt the youngest until the pages are there, or will be when steps retire."""
        while self._pages.free < need:
            if self._pages.free + self._quarantine.pages >= need:
                return False  # they come back by themselves
            victim = self._running[-1]
            if victim is request:
                return False  # it waits for the older ones, and keeps what it has computed
            self._preempt(victim)
        return True

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._release(request)
        request.scheduled = 0
        request.source = None
        request.preemptions += 1
        self._preemptions += 1
        self._waiting.appendleft(request)  # it arrived before all that wait

    def _end(self, request: Request, finish: Finish) -> None:
        request.finish = finish
        del self._live[request.spec.id]
        if request.slot != NULL:
            self._running.remove(request)
            self._release(request)
        else:
            self._waiting.remove(request)

    def _release(self, request: Request) -> None:
        lease = Lease(request.slot, tuple(request.pages))
        if request.steps:
            self._quarantine.hold(lease, request.steps)
        else:
            self._free(lease)
        request.slot = NULL
        request.pages = []
        request.steps = set()

    def _free(self, lease: Lease) -> None:
        self._slots.give_back([lease.slot])
        self._pages.give_back(lease.pages)
