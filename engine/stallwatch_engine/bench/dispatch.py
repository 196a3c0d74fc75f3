"""The dispatcher: sends each request when it is due, and stops all of it at once when the breaker opens.

One task sends (the producer), one task per request in flight waits for its answer. Everything that
opens the breaker happens in one step of the event loop: the producer is cancelled, the client writes
no more and the other tasks are cancelled before any other code can run, so nothing is sent after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from stallwatch_engine.bench.breaker import Breaker, Event, Interrupted, TimedOut
from stallwatch_engine.bench.client import Client
from stallwatch_engine.bench.histogram import Histogram
from stallwatch_engine.bench.plan import Plan
from stallwatch_engine.bench.result import Outcome, Result, placeholder
from stallwatch_engine.bench.timeouts import TimeoutKind
from stallwatch_engine.bench.transcript import End, Transcript

CLEANUP_S = 10.0  # cancelled requests only close their connections
_STOPPED = End(Outcome.CANCELLED, "cancelled: the run was stopped")

OnResult = Callable[[Result], None]


class Dispatcher:
    """One run. `run` once; `interrupt` and `stop` at any time, in the loop."""

    def __init__(
        self, plan: Plan, client: Client, *, fail_fast: bool, on_result: OnResult | None = None
    ) -> None:
        self.breaker = Breaker(fail_fast=fail_fast)
        self.gaps = Histogram()  # of completed requests
        self.duration_s = 0.0
        self.stopped = False
        self._plan = plan
        self._client = client
        self._on_result = on_result
        self._results: list[Result | None] = [None] * len(plan.prompts)
        self._sent = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(plan.concurrency)
        self._producer: asyncio.Task[None] | None = None
        self._fault: BaseException | None = None

    async def run(self) -> tuple[Result, ...]:
        """Results in request order: of every request, or after `stop` of those that were sent."""
        loop = asyncio.get_running_loop()
        self._began = loop.time()
        self._producer = asyncio.create_task(self._produce(), name="bench-producer")
        if self.stopped or not self.breaker.sends:
            self._producer.cancel()
        try:
            await asyncio.wait({self._producer})
            while self._tasks:  # each has its own deadline
                await asyncio.wait(self._tasks)
        finally:
            await self._clean_up()
        if not self._producer.cancelled():
            self._producer.result()
        if self._fault is not None:  # an error of ours must not pass as a finished plan
            raise self._fault
        self.duration_s = loop.time() - self._began
        return self._ordered()

    def interrupt(self) -> None:
        """Ctrl-C: send nothing more, give up what is in flight."""
        self._happened(Interrupted())

    def stop(self) -> None:
        """Send nothing more, wait for what is in flight. The rest was never part of the run."""
        self.stopped = True
        if self._producer is not None:
            self._producer.cancel()

    async def _produce(self) -> None:
        loop = asyncio.get_running_loop()
        for index, due in enumerate(self._plan.arrivals):
            wait = self._began + due - loop.time()
            if wait > 0:
                await asyncio.sleep(wait)
            await self._slots.acquire()
            self._sent = index + 1
            task = asyncio.create_task(self._one(index), name=f"bench-request-{index}")
            self._tasks.add(task)
            task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._slots.release()
        if not task.cancelled() and task.exception() is not None:  # ours, or the caller's on_result
            self._fault = self._fault or task.exception()
            self.interrupt()

    async def _one(self, index: int) -> None:
        seen = Transcript(self._plan.prompts[index], self._began)

        def alarm(kind: TimeoutKind) -> None:
            self._happened(TimedOut(index, kind))

        try:
            end = await self._client.ask(self._plan.prompts[index], seen, alarm)
        except asyncio.CancelledError:
            end = _STOPPED  # this task ends here anyway
        if end.outcome is Outcome.ERROR and not self.breaker.sends:
            end = _STOPPED  # we did not let it leave
        result = seen.result(index, self._plan.arrivals[index], end)
        if result.outcome is Outcome.COMPLETED:
            self.gaps.merge(seen.gaps)
        self._results[index] = result
        if self._on_result is not None:
            self._on_result(result)

    def _happened(self, event: Event) -> None:
        """One event for the breaker; everything ends in this very step when it opens."""
        was, self.breaker = self.breaker, self.breaker.step(event)
        if self.breaker.sends or not was.sends:
            return
        if self._producer is not None:
            self._producer.cancel()
        # The bytes of a request that has just begun are written by a task of the client library,
        # which may run before the cancellation below arrives.
        self._client.sever()
        own = asyncio.current_task()
        for task in self._tasks:
            if task is not own:
                task.cancel()

    async def _clean_up(self) -> None:
        """Only what was cancelled, or what an error of ours left."""
        left = {task for task in (self._producer, *self._tasks) if task and not task.done()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=CLEANUP_S)

    def _ordered(self) -> tuple[Result, ...]:
        found: list[Result] = []
        for index, due in enumerate(self._plan.arrivals):
            result = self._results[index]
            if self.stopped and index >= self._sent:
                break
            expects = self._plan.prompts[index].expect is not None
            found.append(result or placeholder(index, due, expects=expects))
        return tuple(found)
