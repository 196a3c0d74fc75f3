"""What a step ends in. Exactly one of the two, always."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


class StaleOutput(RuntimeError):
    """The copy was said to be complete, and the buffers hold another step."""

    def __init__(self, seq: int, found: int) -> None:
        super().__init__(
            f"the output of step {seq} was said to be copied, and the buffer holds step {found}"
        )
        self.seq = seq
        self.found = found


@dataclass(frozen=True, slots=True)
class Output:
    """The tensors of step `seq` on the host. They are the receiver's own."""

    seq: int
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Failure:
    """Step `seq` has no output, and why."""

    seq: int
    error: BaseException


Answer = Output | Failure
