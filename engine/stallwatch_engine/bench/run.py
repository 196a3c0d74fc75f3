"""The way in from Python: a plan and a target in, a report out."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from stallwatch_engine.bench.client import Client
from stallwatch_engine.bench.dispatch import Dispatcher, OnResult
from stallwatch_engine.bench.gate import Gate, judge
from stallwatch_engine.bench.plan import Plan
from stallwatch_engine.bench.report import Report
from stallwatch_engine.bench.result import Result
from stallwatch_engine.bench.summary import summarise
from stallwatch_engine.bench.target import Target, Timeouts

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Options:
    """How a run behaves.

    fail_fast: the first structural timeout stops everything. duration_s: send nothing new after
    so many seconds, and finish what is in flight. signals: SIGINT and SIGTERM end the run with
    what there is, and a second one ends the program; only in the main thread.
    """

    timeouts: Timeouts = field(default_factory=Timeouts)
    fail_fast: bool = False
    gates: Sequence[Gate] = ()
    duration_s: float | None = None
    signals: bool = False


@dataclass(frozen=True, slots=True)
class Hooks:
    """on_result: called with each result as it comes. on_start: with the dispatcher, before the first request."""

    on_result: OnResult | None = None
    on_start: Callable[[Dispatcher], None] | None = None


def run(
    plan: Plan, target: Target, options: Options | None = None, hooks: Hooks | None = None
) -> Report:
    """Carry out a plan and wait for its report: `run_async` in a loop of its own."""
    return asyncio.run(run_async(plan, target, options, hooks))


async def run_async(
    plan: Plan, target: Target, options: Options | None = None, hooks: Hooks | None = None
) -> Report:
    """Carry out a plan.

    Whatever requests meet is in the report. Raises PlanRefused for prompts that the endpoint does
    not take and TargetUnusable when no model can be found. Cancelling it cancels every request.
    """
    options, hooks = options or Options(), hooks or Hooks()
    for prompt in plan.prompts:
        target.check(prompt)
    if not target.model:
        async with Client(target, options.timeouts, connections=1) as probe:
            target = replace(target, model=await probe.first_model())
    async with Client(target, options.timeouts, connections=plan.concurrency) as client:
        dispatcher = Dispatcher(
            plan, client, fail_fast=options.fail_fast, on_result=hooks.on_result
        )
        if hooks.on_start is not None:
            hooks.on_start(dispatcher)
        results = await _watched(dispatcher, options)
    summary = summarise(results, dispatcher.gaps, dispatcher.duration_s)
    return Report(
        plan=plan,
        target=target,
        results=results,
        summary=summary,
        breaker=dispatcher.breaker,
        gates=judge(options.gates, summary),
        ended_early=dispatcher.stopped,
    )


async def _watched(dispatcher: Dispatcher, options: Options) -> tuple[Result, ...]:
    """The dispatcher's run with its timer and signals, both taken away afterwards."""
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)  # the next one ends the program
        dispatcher.interrupt()

    timer = None
    if options.duration_s is not None:
        timer = loop.call_later(options.duration_s, dispatcher.stop)
    if options.signals:
        for number in _SIGNALS:
            loop.add_signal_handler(number, interrupted)
    try:
        return await dispatcher.run()
    finally:
        if timer is not None:
            timer.cancel()
        if options.signals:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
