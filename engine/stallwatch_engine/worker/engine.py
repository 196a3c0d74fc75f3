"""The scheduler's loop: requests in, steps out, results back to the api. One thread, one inbox.

Nothing waits for a step while another one can be launched. Whatever goes wrong with a step ends the
worker: its states may be half written, and a fresh incarnation is cheaper than a doubtful one.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from stallwatch.heartbeat import Lane
from stallwatch_engine.output.answers import Failure, Output
from stallwatch_engine.sampling.params import SamplingParams
from stallwatch_engine.sampling.sampler import TokenResult, results
from stallwatch_engine.schedule.errors import QueueFull, RequestRefused, RequestTooLong
from stallwatch_engine.schedule.plan import StepPlan, Update
from stallwatch_engine.schedule.request import Finish, RequestSpec
from stallwatch_engine.schedule.scheduler import Scheduler
from stallwatch_engine.wire import (
    Abort,
    Failed,
    PeerGone,
    Sampling,
    Stats,
    Submit,
    TokenLogprob,
    Tokens,
    WireError,
)

STATS_S = 0.25
OUTPUT = "worker:0/output"
WIRE = "worker:0/wire"
LOWEST_LOGPROB = -1e30  # the wire carries no infinity


class StepFailed(RuntimeError):
    """A step has no result: the worker must be replaced."""

    def __init__(self, step: int, cause: BaseException) -> None:
        super().__init__(f"step {step} failed: {cause}")
        self.step = step
        self.cause = cause


@dataclass(frozen=True, slots=True)
class ApiEnded:
    """The api closed its end, or broke the protocol."""

    reason: WireError


Item = Submit | Abort | Output | Failure | ApiEnded
Inbox = queue.SimpleQueue[Item]
Message = Tokens | Failed | Stats


class Gauge(Protocol):
    """Where the number of unfinished requests goes: the board."""

    def pending(self, n: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Ids below `size` are tokens; those in `eos` end an answer."""

    size: int
    eos: frozenset[int]


class Engine:
    """Owns the scheduler. `launch` takes a plan to the executor, `send` a message to the api."""

    def __init__(
        self,
        scheduler: Scheduler,
        inbox: Inbox,
        *,
        launch: Callable[[StepPlan], None],
        send: Callable[[Message], None],
        tokens: Vocabulary,
        lane: Lane,
        gauge: Gauge,
    ) -> None:
        self._inbox = inbox
        self.steps = 0
        self._scheduler = scheduler
        self._launch = launch
        self._send = send
        self._vocabulary = tokens
        self._lane = lane
        self._gauge = gauge
        self._plans: dict[int, StepPlan] = {}
        self._told_ns = 0
        self._pending = -1

    def run(self) -> None:
        """Until the api closes its end. Raises StepFailed, the api having been told; a WireError that is no
        such end (PeerBroke, PeerBusy); PeerGone when the api left in the middle of a message.
        """
        while True:
            plan = self._schedule()
            if plan is not None:
                self._plans[plan.step] = plan
                self._launch(plan)
            if not self._take(block=plan is None):
                return

    def _schedule(self) -> StepPlan | None:
        self._lane.enter("schedule", waiting=self._scheduler.unfinished, steps=self.steps)
        return self._scheduler.schedule()

    def _take(self, *, block: bool) -> bool:
        """Handle what is in the inbox; with `block` wait for the first. False when the api ended."""
        if block:
            self._tell(force=not self._plans)
            if self._plans:
                self._lane.wait("step_output", on=OUTPUT, steps=len(self._plans))
            else:
                self._lane.idle(on=WIRE)
            if not self._handle(self._inbox.get()):
                return False
        while not self._inbox.empty():
            if not self._handle(self._inbox.get()):
                return False
        if self._scheduler.unfinished != self._pending:
            self._pending = self._scheduler.unfinished
            self._gauge.pending(self._pending)
        return True

    def _handle(self, item: Item) -> bool:
        match item:
            case Output():
                self._retire(item)
            case Failure():
                self._fail(item)
            case Submit():
                self._add(item)
            case Abort():
                self._scheduler.end(item.id, Finish.ABORT)
            case ApiEnded():
                if not isinstance(item.reason, PeerGone):
                    raise item.reason
                return False
        return True

    # What the api asks.

    def _add(self, message: Submit) -> None:
        if message.deadline_ns <= time.monotonic_ns():
            self._send(Failed(id=message.id, reason="deadline"))
            return
        if (
            max(message.prompt) >= self._vocabulary.size
        ):  # it would end the step, and all who are in it
            problem = f"token {max(message.prompt)} of a vocabulary of {self._vocabulary.size}"
            self._send(Failed(id=message.id, reason="internal", message=problem))
            return
        try:
            self._scheduler.add(spec_of(message, self._vocabulary.eos))
        except RequestTooLong as error:
            self._send(Failed(id=message.id, reason="too_long", message=error.problem))
        except QueueFull as error:
            self._send(Failed(id=message.id, reason="overload", message=error.problem))
        except RequestRefused as error:
            self._send(Failed(id=message.id, reason="internal", message=error.problem))

    # What a step brings.

    def _retire(self, output: Output) -> None:
        plan = self._plans.pop(output.seq)
        self._lane.enter("retire_step", step=plan.step, requests=plan.rows)
        found = results(output.tensors, [each.params for each in plan.samples])
        failed = frozenset(n for n, each in enumerate(found) if each.failed)
        by_request = dict(zip((each.request_id for each in plan.samples), found, strict=True))
        updates = self._scheduler.retire(plan.step, [each.token for each in found], failed)
        for update in updates:
            self._send(message_of(update, by_request[update.request_id]))
        self.steps += 1
        self._lane.progress(max(1, len(updates)))
        self._tell()

    def _fail(self, failure: Failure) -> None:
        """Every request here depends on states that the step may have left half written."""
        late = isinstance(failure.error, TimeoutError)
        self._send(
            Failed(
                id=None,
                reason="stalled" if late else "internal",
                message=f"step {failure.seq}: {failure.error}"[:1024],
                kind="DEVICE_WAIT" if late else None,
            )
        )
        raise StepFailed(failure.seq, failure.error)

    def _tell(self, *, force: bool = False) -> None:
        """Gauges to the api, a few times a second and before every rest."""
        now = time.monotonic_ns()
        if not force and now - self._told_ns < STATS_S * 1e9:
            return
        self._told_ns = now
        load = self._scheduler.load
        self._send(
            Stats(
                running=load.running,
                waiting=load.waiting,
                free_pages=load.free_pages,
                total_pages=self._scheduler.limits.pages,
                steps=self.steps,
                preemptions=load.preemptions,
            )
        )


def spec_of(message: Submit, eos: frozenset[int]) -> RequestSpec:
    """A request of the wire as the scheduler's. Without a seed its number is one."""
    asked: Sampling = message.sampling
    return RequestSpec(
        message.id,
        tuple(message.prompt),
        asked.max_tokens,
        SamplingParams(
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            seed=time.monotonic_ns() if asked.seed is None else asked.seed,
            logprobs=asked.logprobs,
        ),
        frozenset() if asked.ignore_eos else eos,
    )


def message_of(update: Update, result: TokenResult) -> Tokens | Failed:
    """What a step brought one request, as a message."""
    assert isinstance(update.request_id, int)
    if update.finish is Finish.ERROR or update.token is None:
        return Failed(id=update.request_id, reason="nan_logits")
    logprobs = None
    if result.logprob is not None:
        top = [(token, _finite(value)) for token, value in result.top]
        logprobs = [TokenLogprob(logprob=_finite(result.logprob), top=top)]
    return Tokens(
        id=update.request_id,
        ids=[update.token],
        logprobs=logprobs,
        finish=_FINISH.get(update.finish),
    )


_FINISH: dict[Finish | None, Literal["stop", "length"]] = {
    Finish.STOP: "stop",
    Finish.LENGTH: "length",
}


def _finite(value: float) -> float:
    return min(0.0, max(value, LOWEST_LOGPROB))
