"""What the sampler needs of a step's samples, as tensors on the device, made when the step is planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from stallwatch_engine.sampling.draw import uniform
from stallwatch_engine.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """K samples: those that draw, and those that report log-probabilities, by number."""

    count: int
    drawing: torch.Tensor  # int64[D]: samples with a temperature
    temperature: torch.Tensor  # float64[D]
    top_p: torch.Tensor  # float64[D]
    top_k: torch.Tensor  # int64[D], 0 for all
    chance: torch.Tensor  # float64[D]: where in the cumulated probability the token lies
    reporting: torch.Tensor  # int64[L]: samples that asked for log-probabilities
    alternatives: int  # the most that one of them asked for

    @classmethod
    def of(
        cls, samples: Sequence[tuple[SamplingParams, int]], device: torch.device | str = "cpu"
    ) -> SampleBatch:
        """From each sample's parameters and how many tokens its request has sampled before."""
        drawing = [n for n, (params, _) in enumerate(samples) if not params.greedy]
        reporting = [n for n, (params, _) in enumerate(samples) if params.logprobs is not None]
        chosen = [samples[n] for n in drawing]

        def numbers(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
            return (
                torch.tensor(values, dtype=dtype, device=device) if values else _none(dtype, device)
            )

        return cls(
            count=len(samples),
            drawing=numbers(drawing, torch.int64),
            temperature=numbers([params.temperature for params, _ in chosen], torch.float64),
            top_p=numbers([params.top_p for params, _ in chosen], torch.float64),
            top_k=numbers([params.top_k for params, _ in chosen], torch.int64),
            chance=numbers(
                [uniform(params.seed, count) for params, count in chosen], torch.float64
            ),
            reporting=numbers(reporting, torch.int64),
            alternatives=max((samples[n][0].logprobs or 0 for n in reporting), default=0),
        )


@lru_cache(maxsize=8)
def _none(dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Shared, since nothing can be written to it: most steps are greedy and report nothing."""
    return torch.empty(0, dtype=dtype, device=device)
