"""Steps on a device: everything that a plan asks for is enqueued, nothing is waited for.

A step on the model stream: make the stores what the plan expects, take in the inputs and what the step
before sampled, stage the ids for the n-gram tables, compute the layers before the first table, wait for
its rows, compute the rest, sample. The output thread copies the samples out behind it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from stallwatch.heartbeat import Lane
from stallwatch_engine.checkpoint.weights import ModelWeights
from stallwatch_engine.execute.coverage import Coverage, shape_of
from stallwatch_engine.execute.host import HostStep, host_step
from stallwatch_engine.execute.intake import advance, open_intake, warm_advance
from stallwatch_engine.execute.old_inputs import SHARED_EVENT, old_inputs
from stallwatch_engine.execute.ring import SampledRing
from stallwatch_engine.execute.settings import ExecuteSettings, Runner
from stallwatch_engine.execute.streams import Streams
from stallwatch_engine.faults import Faults
from stallwatch_engine.inputs.mirrored import MirroredInputs
from stallwatch_engine.inputs.staged import StagedInputs
from stallwatch_engine.inputs.step import InputMode, StepInputs
from stallwatch_engine.model.buffers import StepBuffers
from stallwatch_engine.model.open import open_forward
from stallwatch_engine.output.answers import Answer
from stallwatch_engine.output.thread import OutputThread
from stallwatch_engine.ple.protocol import PleBackend
from stallwatch_engine.sampling.batch import SampleBatch
from stallwatch_engine.sampling.params import GREEDY
from stallwatch_engine.sampling.sampler import sample
from stallwatch_engine.schedule.limits import Limits
from stallwatch_engine.schedule.plan import StepPlan
from stallwatch_engine.state.context import TokenContext
from stallwatch_engine.state.stores import StateStores
from stallwatch_kernels.pool import SERIAL, RowPool


@dataclass(frozen=True, slots=True)
class Lanes:
    """How the executor's threads get their lanes; each is called in the thread that owns the lane."""

    request: Callable[[], Lane]
    output: Callable[[], Lane]


@dataclass(frozen=True, slots=True)
class Machine:
    """What a step runs on."""

    streams: Streams
    lanes: Lanes
    pool: RowPool = SERIAL


class Executor:
    """launch() from one thread. `deliver` gets one Answer per step, in order, in the output thread."""

    def __init__(
        self,
        weights: ModelWeights,
        stores: StateStores,
        *,
        limits: Limits,
        settings: ExecuteSettings,
        backend: PleBackend | None,
        machine: Machine,
        deliver: Callable[[Answer], None],
        faults: Faults,
    ) -> None:
        streams, lanes = machine.streams, machine.lanes
        self.settings = settings
        self.coverage = Coverage.up_to(limits.max_seqs)
        self.buffers = StepBuffers.empty(
            weights.config,
            tokens=limits.token_budget,
            requests=limits.max_seqs,
            slots=limits.slots,
            device=stores.spec.device,
        )
        self._device = stores.spec.device
        self._pinned = torch.device(self._device).type != "cpu"
        self.forward = open_forward(weights, stores, self.buffers, pool=machine.pool)
        self.ring = SampledRing(
            limits.max_in_flight, limits.max_seqs, weights.config.vocab, self._device
        )
        self._stores = stores
        self._streams = streams
        self._backend = backend
        self._supplier = "worker:0/ple-request" if backend is None else _supplier(backend)
        self._mirror = self._host_context(limits, weights)
        context = stores.context if self._mirror is None else None
        self._intake = open_intake(self.buffers, self.ring, context)
        self._output = OutputThread(
            (streams.model, streams.copy),
            streams.make_event,
            deliver,
            capacity=limits.max_in_flight,
            timeout_s=settings.timeout_s,
            make_lane=lanes.output,
            pinned=self._pinned,
        )
        self._inputs = self._open_inputs(limits, lanes, faults)

    def launch(self, plan: StepPlan) -> None:
        """Enqueue the step. Raises what an earlier step's stream, rows or inputs failed with."""
        self.coverage.meet(shape_of(plan.tokens, plan.rows))
        step = host_step(plan)
        batch = SampleBatch.of([(each.params, each.count) for each in plan.samples], self._device)
        self._enqueue("prepare_step", lambda: self._prepare(plan, step))
        if self._inputs is not None:
            self._inputs.stage(self._ids_for_rows(plan, step))
        self._enqueue("forward", lambda: self.forward.begin(step.tokens, step.requests))
        if self._backend is not None:
            self._streams.model.enqueue(
                "ple_wait", lambda: self._take_rows(step.step, step.tokens), on=self._supplier
            )
        self._enqueue("forward", lambda: self._finish(step, batch))
        found = self.ring.views(step.step, batch)
        # a tensor less is an allocation and a copy less, and few requests ask for log-probabilities
        reports = (
            found.tensors() if len(found.logprobs) else {"ids": found.ids, "failed": found.failed}
        )
        self._output.put(step.step, reports)

    def prepare(self, requests: int) -> None:
        """One dummy step of that decode shape on null slots, which asks no n-gram table."""
        self._dummy(requests, requests)

    def prepare_prefill(self) -> None:
        """The same for a step of one request with several tokens."""
        if self._stores.context is not None:
            warm_advance(self._stores.context.ids.shape[1])
        self._dummy(min(self.buffers.tokens, 8), 1)

    def synchronize(self, timeout_s: float) -> None:
        """Wait for everything enqueued so far."""
        self._streams.model.synchronize(time.monotonic() + timeout_s)

    def close(self, timeout_s: float) -> None:
        """Answer for what is under way, then end the threads. The streams are the caller's."""
        if self._inputs is not None:
            self._inputs.close(timeout_s)
        self._output.close(timeout_s)

    def _enqueue(self, operation: str, work: Callable[[], None]) -> None:
        self._streams.model.enqueue(operation, work)

    # On the model stream.

    def _prepare(self, plan: StepPlan, step: HostStep) -> None:
        self._stores.prepare(plan)
        self._intake(step)

    def _take_rows(self, step: int, tokens: int) -> None:
        assert self._backend is not None
        rows = self._backend.wait(step, time.monotonic() + self.settings.timeout_s)
        self.forward.rows[:, :tokens].copy_(rows)
        self._backend.consumed(step)

    def _finish(self, step: HostStep, batch: SampleBatch) -> None:
        logits = self.forward.finish(step.tokens, step.requests, step.samples)
        self.ring.put(sample(logits, batch), self.ring.views(step.step, batch))

    def _dummy(self, tokens: int, requests: int) -> None:
        def run() -> None:
            buffers = self.buffers
            buffers.ids[:tokens].zero_()
            buffers.positions[:tokens].zero_()
            buffers.owner[:tokens].fill_(-1)
            starts = torch.arange(requests + 1, dtype=torch.int32)
            starts[-1] = tokens
            buffers.starts[: requests + 1].copy_(starts)
            buffers.slots[:requests].fill_(-1)
            buffers.sampled[:requests].zero_()
            self.forward.rows[:, :tokens].zero_()
            self.forward.begin(tokens, requests)
            logits = self.forward.finish(tokens, requests, requests)
            sample(logits, SampleBatch.of([(GREEDY, 0)] * requests, self._device))

        self._enqueue("prepare_shape", run)
        self.synchronize(self.settings.timeout_s)
        self.coverage.prepared.add(shape_of(tokens, requests))

    # Inputs of the n-gram tables.

    def _open_inputs(self, limits: Limits, lanes: Lanes, faults: Faults) -> InputMode | None:
        if self._backend is None:
            return None
        if faults.hit(SHARED_EVENT) is not None:
            return old_inputs(
                self._backend,
                self._streams,
                faults=faults,
                timeout_s=self.settings.timeout_s,
                make_lane=lanes.request,
            )
        if self.settings.runner is Runner.MRV1:
            return MirroredInputs(self._backend, make_lane=lanes.request)
        return StagedInputs(
            self._backend,
            self._streams.model,
            lambda: self._streams.make_event("inputs"),
            max_concurrent_batches=limits.max_in_flight,
            timeout_s=self.settings.timeout_s,
            make_lane=lanes.request,
            pinned=self._pinned,
        )

    def _host_context(self, limits: Limits, weights: ModelWeights) -> TokenContext | None:
        """MRV1 keeps the ids before each request's next step on the host."""
        ple = weights.config.ple
        if self.settings.runner is not Runner.MRV1 or ple is None:
            return None
        if limits.max_in_flight != 1:
            raise ValueError("MRV1 knows a step's ids only after the step before: max_in_flight=1")
        return TokenContext(limits.slots, ple.context, eos=ple.numbers.eos)

    def _ids_for_rows(self, plan: StepPlan, step: HostStep) -> StepInputs:
        if self._mirror is None:
            buffers = self.buffers
            return StepInputs(
                step.step,
                buffers.ids[: step.tokens],
                buffers.starts[: step.requests + 1],
                buffers.context[: step.requests],
            )
        if plan.fresh:
            self._mirror.begin(torch.tensor(plan.fresh))
        context = torch.empty(step.requests, self._mirror.ids.shape[1], dtype=torch.int32)
        ids, starts = step.ids, step.starts
        advance(self._mirror.ids.numpy(), step.slots, starts, ids, context.numpy())
        return StepInputs(step.step, torch.from_numpy(ids), torch.from_numpy(starts), context)


def _supplier(backend: PleBackend) -> str:
    """The lane that brings rows: the offload process, or this process's request thread."""
    from stallwatch_engine.ple.offload.client import OffloadBackend

    return "offload:0/ple" if isinstance(backend, OffloadBackend) else "worker:0/ple-request"
