"""A plan as host arrays, ready to be taken in on the model stream. Pure.

numpy and not torch: made and copied for every step, beside a stream that waits for the interpreter's lock,
a small array costs a fifth of a small tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stallwatch_engine.schedule.plan import ON_DEVICE, StepPlan
from stallwatch_kernels.tensors import Array


@dataclass(frozen=True, slots=True)
class HostFeed:
    """ids[index] = what step `step` sampled as `samples`; both int64."""

    step: int
    index: Array
    samples: Array


@dataclass(frozen=True, slots=True)
class HostStep:
    """One step. int32 but where said otherwise."""

    step: int
    ids: Array  # [T]: 0 where a feed brings the id
    positions: Array  # [T]
    owner: Array  # [T]
    starts: Array  # [R + 1]
    slots: Array  # [R]
    seq_lens: Array  # [R]
    sampled: Array  # int64[K]: each sample's last token
    feeds: tuple[HostFeed, ...]

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.ids)

    @property
    def requests(self) -> int:
        """R."""
        return len(self.slots)

    @property
    def samples(self) -> int:
        """K."""
        return len(self.sampled)


def host_step(plan: StepPlan) -> HostStep:
    """The plan's numbers as arrays."""
    starts, slots = _ints(plan.query_start_loc), _ints(plan.slots)
    ids = _ints(plan.ids)
    if plan.feeds:
        ids[ids == ON_DEVICE] = 0
    decode = plan.tokens == plan.rows
    last = plan.query_start_loc
    return HostStep(
        step=plan.step,
        ids=ids,
        positions=_ints(plan.positions),
        owner=slots if decode else np.repeat(slots, np.diff(starts)),
        starts=starts,
        slots=slots,
        seq_lens=_ints(plan.seq_lens),
        sampled=np.array([last[sample.row + 1] - 1 for sample in plan.samples], np.int64),
        feeds=_feeds(plan),
    )


def _feeds(plan: StepPlan) -> tuple[HostFeed, ...]:
    by_step: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for feed in plan.feeds:
        by_step[feed.step].append((feed.index, feed.sample))
    return tuple(
        HostFeed(step, *np.array(pairs, np.int64).T.copy()) for step, pairs in by_step.items()
    )


def _ints(values: Sequence[int]) -> Array:
    return np.array(values, np.int32)
