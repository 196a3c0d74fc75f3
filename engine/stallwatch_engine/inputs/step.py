"""One step's inputs to PLE, and the host buffers that they pass through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from stallwatch_engine.ple.shape import PleShape


class StaleInputs(RuntimeError):
    """The host buffer holds another step's inputs than the event promised: the step must fail."""

    def __init__(self, seq: int, found: int) -> None:
        super().__init__(
            f"inputs of step {seq} were said to be copied, and the buffer holds those of step {found}"
        )
        self.seq = seq
        self.found = found


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Step `seq`: ids int32[T], query_start_loc int32[R+1], context int32[R, n-1], on host or device.

    The tensors stay as they are until the step has retired.
    """

    seq: int
    ids: torch.Tensor
    query_start_loc: torch.Tensor
    context: torch.Tensor


class InputMode(Protocol):
    """Takes each step's inputs before its forward is enqueued, and sees that they are submitted."""

    @property
    def capacity(self) -> int:
        """Steps that may be staged at a time."""

    def stage(self, inputs: StepInputs) -> None:
        """Never blocks: OverContract for one step more than `capacity`. Raises what a submit raised."""

    def close(self, timeout_s: float) -> None:
        """End the request thread; TimeoutError when it does not end."""


class HostSlot:
    """Static host buffers for one step, pinned on an accelerator. The stamp is copied last.

    One slot is enough for any number of steps in flight: the copies of step N+1 run on the model stream
    behind step N's wait for its rows, and rows are only published after their inputs were read.
    """

    def __init__(self, shape: PleShape, *, pinned: bool = False) -> None:
        older = shape.ngram - 1
        self._ids = torch.zeros(shape.max_tokens, dtype=torch.int32, pin_memory=pinned)
        self._starts = torch.zeros(shape.max_requests + 1, dtype=torch.int32, pin_memory=pinned)
        self._context = torch.zeros(shape.max_requests, older, dtype=torch.int32, pin_memory=pinned)
        self._stamp = torch.full((1,), -1, dtype=torch.int64, pin_memory=pinned)

    def fill(self, inputs: StepInputs) -> None:
        """Copy a step's inputs here, in the order of the current stream."""
        tokens, requests = inputs.ids.shape[0], inputs.context.shape[0]
        self._ids[:tokens].copy_(inputs.ids, non_blocking=True)
        self._starts[: requests + 1].copy_(inputs.query_start_loc, non_blocking=True)
        self._context[:requests].copy_(inputs.context, non_blocking=True)
        stamp = torch.full((1,), inputs.seq, dtype=torch.int64, device=inputs.ids.device)
        self._stamp.copy_(stamp, non_blocking=True)

    def view(self, seq: int, tokens: int, requests: int) -> StepInputs:
        """The inputs of that step, in place. StaleInputs when the buffers hold another step's."""
        found = int(self._stamp)
        if found != seq:
            raise StaleInputs(seq, found)
        return StepInputs(
            seq, self._ids[:tokens], self._starts[: requests + 1], self._context[:requests]
        )
