"""A packed batch over state slots, as convolution and recurrence share it.

Request r owns the rows `query_start_loc[r]` to `query_start_loc[r + 1]` of the packed tokens and the slot
`slots[r]` of the state, which holds what its earlier tokens left and is zeroed when a request begins.
`NULL_SLOT` marks a padding request: its rows are read by nobody and written as zero, no state is touched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from stallwatch_kernels.errors import BadIndex, BadMetadata
from stallwatch_kernels.pool import RowPool
from stallwatch_kernels.tensors import Array, contiguous

NULL_SLOT = -1

Call = Callable[[int], None]
"""A kernel bound to its buffers: computes the first n requests."""


@dataclass(frozen=True, slots=True)
class Carried:
    """State that requests carry: `state` [slots, ...], and int32 `slots` [R], `query_start_loc` [R + 1]."""

    state: torch.Tensor
    slots: torch.Tensor
    query_start_loc: torch.Tensor


class Batch:
    """The two index buffers of a packed batch, read anew at every call."""

    def __init__(self, kernel: str, carried: Carried, tokens: int) -> None:
        slots, starts = carried.slots, carried.query_start_loc
        self.kernel = kernel
        self.slots: Array = contiguous(kernel, "slots", slots, torch.int32)
        self.starts: Array = contiguous(kernel, "query_start_loc", starts, torch.int32)
        self.most = slots.numel()
        self.tokens = tokens
        self.states = carried.state.shape[0]
        if slots.ndim != 1 or starts.shape != (self.most + 1,):
            raise BadMetadata(
                kernel,
                "query_start_loc",
                f"has shape {tuple(starts.shape)}; expected one more than "
                f"the {tuple(slots.shape)} of slots",
            )

    def check(self, requests: int) -> None:
        """Refuse a batch that would leave its buffers or write one slot twice."""
        name, tokens, states = self.kernel, self.tokens, self.states
        if not 0 <= requests <= self.most:
            raise BadMetadata(name, "requests", f"= {requests}; the buffers hold {self.most}")
        if not requests:
            return
        starts = self.starts[: requests + 1].tolist()
        slots = self.slots[:requests].tolist()
        if starts[0] != 0 or starts[-1] > tokens or sorted(starts) != starts:
            raise BadMetadata(
                name, "query_start_loc", f"= {_short(starts)} does not rise from 0 to <= {tokens}"
            )
        used = [slot for slot in slots if slot != NULL_SLOT]
        if used and not 0 <= min(used) <= max(used) < states:
            raise BadIndex(name, "slots", f"= {_short(slots)} outside of 0..{states - 1}")
        if len(set(used)) != len(used):
            raise BadMetadata(name, "slots", f"= {_short(slots)} name a state twice")


def over(pool: RowPool, parts: int, work: Callable[[int, int], object]) -> None:
    """Run `work(lo, hi)` over independent parts, without the pool if it has one thread."""
    if pool.threads == 1:
        work(0, parts)
    else:
        pool.run(work, parts)


def null_batch(state: torch.Tensor, requests: int) -> Carried:
    """A padding batch of one token for each of `requests`: what a warm-up runs."""
    slots = torch.full((requests,), NULL_SLOT, dtype=torch.int32)
    return Carried(state, slots, torch.arange(requests + 1, dtype=torch.int32))


def _short(values: list[int]) -> str:
    return np.array2string(np.array(values), threshold=12, separator=", ")
