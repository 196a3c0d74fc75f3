"""Scheduler and stores together: whatever is aborted, preempted or reused, no step finds another's canary."""

from __future__ import annotations

import random

import pytest
import torch

from stallwatch_engine.checkpoint.parse import parse_config
from stallwatch_engine.checkpoint.tiny import tiny_settings
from stallwatch_engine.sampling.params import SamplingParams
from stallwatch_engine.schedule.limits import Limits
from stallwatch_engine.schedule.plan import StepPlan
from stallwatch_engine.schedule.request import RequestSpec
from stallwatch_engine.schedule.testing import Engine, alone
from stallwatch_engine.state.pages import NULL
from stallwatch_engine.state.stores import GdnStore, QsaStore, StateStores, StoreSpec

CONFIG = parse_config(tiny_settings())
PAGE = 4


def stores_for(limits: Limits, kv_dtype: torch.dtype) -> StateStores:
    return StateStores(
        CONFIG,
        StoreSpec(
            slots=limits.slots,
            pages=limits.pages,
            page_size=PAGE,
            max_pages=limits.max_pages,
            kv_dtype=kv_dtype,
        ),
    )


class Canaries:
    """Each request writes its own number into every page and slot it uses, and looks at all of them first."""

    def __init__(self, limits: Limits, kv_dtype: torch.dtype) -> None:
        self.stores = stores_for(limits, kv_dtype)
        self.checked = 0

    def run(self, plan: StepPlan) -> None:
        self.stores.prepare(plan)
        for row, (name, slot) in enumerate(zip(plan.request_ids, plan.slots, strict=True)):
            # below 240 and no NaN pattern in E4M3: compared as bytes anyway
            canary = 1 + int(str(name)[1:]) % 119
            used = -(-plan.seq_lens[row] // PAGE)
            pages = self.stores.tables.entries[slot, :used].tolist()
            assert NULL not in pages
            for layer in self.stores.layers:
                for tensor in self._mine(layer, slot, pages):
                    self._look(tensor, canary)
                    tensor.fill_(canary)

    def _mine(self, layer, slot, pages):
        """Views of the bytes that this request may read in this layer."""
        if isinstance(layer, QsaStore):
            for page in pages:
                yield layer.k[page].view(torch.uint8)
                yield layer.v[page].view(torch.uint8)
                yield layer.index[page].view(torch.uint8)
            yield layer.ring[slot].view(torch.uint8)
        else:
            assert isinstance(layer, GdnStore)
            yield layer.conv[slot].view(torch.uint8)
            yield layer.recurrent[slot].view(torch.uint8)
            if layer.ple_conv is not None:
                yield layer.ple_conv[slot].view(torch.uint8)

    def _look(self, tensor, canary):
        found = set(tensor.unique().tolist())
        assert found in ({0}, {canary}), f"canary {canary} found {found}"
        self.checked += 1


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_reuse_never_leaks(kv_dtype, depth):
    """Sixty requests through three rows and few pages, aborted at random: every byte read is one's own or zero."""
    limits = Limits(
        max_seqs=3,
        token_budget=12,
        max_model_len=40,
        page_size=PAGE,
        pages=11,
        max_in_flight=depth,
    )
    engine = Engine(limits)
    canaries = Canaries(limits, kv_dtype)
    chance = random.Random(depth)
    specs = {}
    aborted = set()
    for number in range(60):
        spec = RequestSpec(
            f"r{number}",
            tuple(chance.randrange(50) for _ in range(chance.randint(1, 20))),
            chance.randint(1, 15),
            SamplingParams(seed=number),
        )
        specs[spec.id] = spec
        engine.scheduler.add(spec)
    while engine.scheduler.unfinished or engine.device.flying:
        plan = engine.step()
        if plan is not None:
            canaries.run(plan)
        if plan is None or chance.random() < 0.4:
            engine.retire()
        if chance.random() < 0.05 and engine.scheduler._running:
            victim = chance.choice(engine.scheduler._running).spec.id
            aborted.add(victim)
            engine.scheduler.end(victim)
    engine.idle()
    assert len(aborted) > 3
    assert engine.scheduler.load.preemptions > 0
    assert canaries.checked > 3000
    for name, spec in specs.items():
        if name not in aborted:
            assert engine.answers[name] == alone(spec)
