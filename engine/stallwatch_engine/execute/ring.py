"""Where steps leave what they sampled: one static place for each step that may be in flight.

The step after it reads its ids from there on the model stream; the output thread copies them out.
"""

from __future__ import annotations

import torch

from stallwatch_engine.sampling.batch import SampleBatch
from stallwatch_engine.sampling.params import MAX_LOGPROBS
from stallwatch_engine.sampling.sampler import Sampled


class SampledRing:
    """`steps` places of `samples` samples each, for a vocabulary of `vocab`."""

    def __init__(
        self, steps: int, samples: int, vocab: int, device: torch.device | str = "cpu"
    ) -> None:
        self._alternatives = min(MAX_LOGPROBS, vocab)

        def room(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros((steps, *shape), dtype=dtype, device=device)

        self.ids = room(samples, dtype=torch.int32)
        self.failed = room(samples, dtype=torch.bool)
        self._logprobs = room(samples, dtype=torch.float32)
        self._top_ids = room(samples, self._alternatives, dtype=torch.int32)
        self._top = room(samples, self._alternatives, dtype=torch.float32)
        self._steps = steps

    def views(self, step: int, batch: SampleBatch) -> Sampled:
        """The step's place, cut to what the batch brings."""
        at, count, reporting = step % self._steps, batch.count, len(batch.reporting)
        many = min(batch.alternatives, self._alternatives)
        return Sampled(
            self.ids[at, :count],
            self.failed[at, :count],
            self._logprobs[at, :reporting],
            self._top_ids[at, :reporting, :many],
            self._top[at, :reporting, :many],
        )

    def ids_of(self, step: int) -> torch.Tensor:
        """int32[samples]: what a step that is still in flight, or just was, sampled."""
        return self.ids[step % self._steps]

    @staticmethod
    def put(found: Sampled, place: Sampled) -> None:
        """Copy a step's samples to their place."""
        place.ids.copy_(found.ids)
        place.failed.copy_(found.failed)
        if len(place.logprobs):
            place.logprobs.copy_(found.logprobs)
            place.top_ids.copy_(found.top_ids)
            place.top_logprobs.copy_(found.top_logprobs)
