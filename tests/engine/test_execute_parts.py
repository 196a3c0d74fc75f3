"""The pure parts of a step: a plan as tensors, where samples lie, which shapes are covered, what options mean."""

from __future__ import annotations

import json
import random

import pytest
import torch

from stallwatch_engine.checkpoint.parse import parse_config
from stallwatch_engine.checkpoint.tiny import tiny_settings
from stallwatch_engine.execute.coverage import PREFILL, Coverage, shape_of
from stallwatch_engine.execute.host import host_step
from stallwatch_engine.execute.intake import DeviceIntake, HostIntake
from stallwatch_engine.execute.ring import SampledRing
from stallwatch_engine.execute.settings import ExecuteSettings, Runner
from stallwatch_engine.faults import Faults, parse
from stallwatch_engine.model.buffers import StepBuffers
from stallwatch_engine.sampling.batch import SampleBatch
from stallwatch_engine.sampling.params import SamplingParams
from stallwatch_engine.sampling.sampler import sample
from stallwatch_engine.schedule.limits import Limits
from stallwatch_engine.schedule.request import RequestSpec
from stallwatch_engine.schedule.scheduler import Scheduler
from stallwatch_engine.serve import worker_options
from stallwatch_engine.state.context import TokenContext
from stallwatch_engine.worker.injected import inject
from stallwatch_engine.worker.options import BadOptions, WorkerOptions

CONFIG = parse_config(tiny_settings())


def scheduler(**changes) -> Scheduler:
    limits = {"max_seqs": 3, "token_budget": 8, "max_model_len": 64, "page_size": 4, "pages": 40}
    return Scheduler(Limits(**{**limits, **changes}))


def test_a_plan_becomes_tensors():
    """Tokens know their slot, samples their last token, and an id on the device is fed and not guessed."""
    plans = scheduler()
    plans.add(RequestSpec("a", (1, 2, 3), 4))
    plans.add(RequestSpec("b", (9,), 4))
    first = host_step(plans.schedule())
    assert first.ids.tolist() == [1, 2, 3, 9]
    assert first.owner.tolist() == [0, 0, 0, 1]
    assert first.sampled.tolist() == [2, 3]
    assert first.feeds == ()
    second = host_step(plans.schedule())
    assert second.ids.tolist() == [0, 0]
    assert second.positions.tolist() == [3, 1]
    (feed,) = second.feeds
    assert (feed.step, feed.index.tolist(), feed.samples.tolist()) == (0, [0, 1], [0, 1])
    assert (second.tokens, second.requests, second.samples) == (2, 2, 2)


def test_both_intakes_leave_the_same():
    """By arrays on a CPU, by copies on an accelerator: the same buffers and contexts over random chunks."""
    sides = []
    for make in (HostIntake, DeviceIntake):
        chance = random.Random(4)
        plans = scheduler(max_chunk=3)
        buffers = StepBuffers.empty(CONFIG, tokens=8, requests=3, slots=plans.limits.slots)
        ring = SampledRing(2, 3, 300)
        context = TokenContext(plans.limits.slots, 2, eos=257)
        intake, seen = make(buffers, ring, context), []
        for name in range(9):
            prompt = tuple(chance.randrange(256) for _ in range(chance.randint(1, 7)))
            plans.add(RequestSpec(name, prompt, 4))
        flying = []
        while plans.unfinished or flying:
            plan = plans.schedule()
            if plan is None:
                done = flying.pop(0)
                plans.retire(done.step, ring.ids_of(done.step)[: len(done.samples)].tolist())
                continue
            flying.append(plan)
            context.begin(torch.tensor(plan.fresh, dtype=torch.int64))
            intake(host_step(plan))
            fresh = [chance.randrange(256) for _ in plan.samples]
            ring.ids_of(plan.step)[: len(fresh)] = torch.tensor(fresh, dtype=torch.int32)
            used = plan.tokens, plan.rows
            seen.append([buffers.ids[: used[0]].clone(), buffers.context[: used[1]].clone()])
            seen[-1] += [
                buffers.owner[: used[0]].clone(),
                buffers.seq_lens.clone(),
                context.ids.clone(),
            ]
        sides.append(seen)
    assert len(sides[0]) == len(sides[1]) > 10
    for one, other in zip(*sides, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_step_without_samples_is_one():
    """A chunk in the middle of a prompt samples nothing."""
    plans = scheduler(token_budget=4)
    plans.add(RequestSpec("a", tuple(range(10)), 1))
    step = host_step(plans.schedule())
    assert (step.tokens, step.samples) == (4, 0)


def test_the_ring_keeps_each_step_apart():
    """Two steps' samples lie in two places, with the log-probabilities that were asked for, and no more."""
    ring = SampledRing(2, 3, 50)
    logits = torch.randn(3, 50)
    batches = [
        SampleBatch.of([(SamplingParams(logprobs=n), 0) for n in counts])
        for counts in ((None, 2, 0), (None, None, None))
    ]
    for step, batch in enumerate(batches):
        ring.put(sample(logits + step, batch), ring.views(step, batch))
    found = ring.views(0, batches[0])
    assert found.ids.tolist() == logits.argmax(-1).tolist()
    assert (found.logprobs.shape, found.top_ids.shape) == ((2,), (2, 2))
    assert ring.views(1, batches[1]).logprobs.shape == (0,)
    assert ring.ids_of(0).data_ptr() != ring.ids_of(1).data_ptr()
    assert ring.ids_of(0).data_ptr() == ring.ids_of(2).data_ptr()


def test_shapes_are_counted():
    """A decode step is named by its requests, everything else is prefill; what was not prepared is counted."""
    coverage = Coverage.up_to(2)
    assert coverage.declared == ("C1", "C2", PREFILL)
    coverage.prepared |= {"C1", PREFILL}
    for tokens, requests in ((1, 1), (2, 2), (7, 2), (2, 2)):
        coverage.meet(shape_of(tokens, requests))
    assert coverage.missed == {"C2": 2}
    assert not coverage.complete
    assert str(coverage) == "prepared 1/2 decode shapes, not C2; graph=none, captured=0"


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_timeout_that_never_comes_is_refused(seconds):
    """Before any step waits for it."""
    with pytest.raises(ValueError, match="timeout_s"):
        ExecuteSettings(timeout_s=seconds)


def test_options_pass_between_processes():
    """What the command line writes is what the worker reads; anything else is refused in one line."""
    options = WorkerOptions(model="m", max_num_seqs=3, shapes=(1, 2))
    assert WorkerOptions.parse(options.pack()) == options
    assert WorkerOptions.parse(worker_options("m", {"max_num_seqs": 3})).max_num_seqs == 3
    for text in ("", "[]", "{}", json.dumps({"model": "m", "unknown": 1})):
        with pytest.raises(BadOptions):
            WorkerOptions.parse(text)


def test_options_become_limits():
    """MRV1 runs nothing ahead; without chunks a step holds the longest request; what contradicts is refused."""
    assert WorkerOptions(model="m", runner=Runner.MRV1).limits(CONFIG).max_in_flight == 1
    whole = WorkerOptions(model="m", chunked_prefill=False, max_model_len=900).limits(CONFIG)
    assert whole.token_budget == 900
    assert WorkerOptions(model="m").limits(CONFIG).capacity == CONFIG.max_position
    with pytest.raises(BadOptions, match="max_chunk"):
        WorkerOptions(model="m", max_chunk=0).limits(CONFIG)
    for what, said in (({"kv_dtype": "int3"}, "kv_dtype=int3"), ({"page_size": 6}, "page_size")):
        options = WorkerOptions(model="m", **what)
        limits = options.limits(CONFIG)
        with pytest.raises(BadOptions, match=said):
            options.stores(CONFIG, limits)
    with pytest.raises(BadOptions, match="timeout_s"):
        WorkerOptions(model="m", step_timeout=0).execute()
    with pytest.raises(BadOptions, match="folder"):
        WorkerOptions(model="m", ple_backend="disk").ple()


def test_no_fault_no_harm():
    """Without faults a launch injects nothing; one for another step neither."""
    inject(Faults(), 3)
    inject(Faults((parse("worker.crash@4"),)), 3)
