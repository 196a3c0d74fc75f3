"""What an executor is told once."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from stallwatch_engine.streams.bounded import check_timeout


class Runner(enum.StrEnum):
    """Where a step's token ids come from."""

    MRV1 = "mrv1"  # host copies of everything, one step at a time
    MRV2 = "mrv2"  # sampled ids stay on the device, steps run ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecuteSettings:
    """`shapes` are the decode steps (requests at once) that the warm-up prepares; None: all that are allowed.

    `timeout_s` bounds every wait of a step: for its n-gram rows, its copied inputs, its copied output.
    """

    runner: Runner = Runner.MRV2
    shapes: tuple[int, ...] | None = None
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        check_timeout(self.timeout_s, "timeout_s")
        if self.shapes is not None and any(shape < 1 for shape in self.shapes):
            raise ValueError(f"shapes={self.shapes}: a step has at least one request")
