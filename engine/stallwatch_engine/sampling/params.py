"""What a request asks of the sampler, checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

MAX_LOGPROBS: Final = 20  # alternatives a row; bounds what is copied from the device


class BadSampling(ValueError):
    """A sampling parameter that means nothing. The client must change it."""

    def __init__(self, parameter: str, problem: str) -> None:
        super().__init__(f"{parameter} {problem}")
        self.parameter = parameter
        self.problem = problem


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Temperature 0 is greedy. `top_k` 0 and `top_p` 1 cut nothing. `logprobs` None reports none.

    The token is a function of (logits, parameters, `seed`, how many tokens the request has produced):
    a request gets the same tokens in any batch and after a preemption. Whoever creates the request draws
    the seed when the client named none.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise BadSampling(
                "temperature", f"must be finite and at least 0, got {self.temperature}"
            )
        if not 0 < self.top_p <= 1:
            raise BadSampling("top_p", f"must be over 0 and at most 1, got {self.top_p}")
        if self.top_k < 0:
            raise BadSampling("top_k", f"must be at least 0, got {self.top_k}")
        if not -(1 << 63) <= self.seed < 1 << 64:
            raise BadSampling("seed", f"must fit in 64 bits, with or without sign, got {self.seed}")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise BadSampling("logprobs", f"must be 0 to {MAX_LOGPROBS}, got {self.logprobs}")

    @property
    def greedy(self) -> bool:
        """Whether no random number is needed."""
        return self.temperature == 0


GREEDY: Final = SamplingParams()
