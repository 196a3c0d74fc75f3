"""Logits to token ids, each row by itself.

A row's result has the same bits in any batch: what is rounded is computed along the row alone (softmax,
cumulated sum), and everything else is exact per element (a quotient, a comparison, a sort).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from stallwatch_engine.sampling.batch import SampleBatch
from stallwatch_engine.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Sampled:
    """A step's samples on the device. A failed one has a legal id: the next step may already read it.

    Its log-probabilities mean nothing.
    """

    ids: torch.Tensor  # int32[K]
    failed: torch.Tensor  # bool[K]: a logit was not finite
    logprobs: torch.Tensor  # float32[L]: of the sampled ids, for the samples that report
    top_ids: torch.Tensor  # int32[L, n]: the likeliest tokens, best first
    top_logprobs: torch.Tensor  # float32[L, n]

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name, to be copied to the host."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class TokenResult:
    """One sample on the host. `logprob` is None unless asked for and finite; `top` has as many as asked for."""

    token: int
    failed: bool
    logprob: float | None
    top: tuple[tuple[int, float], ...]


def sample(logits: torch.Tensor, batch: SampleBatch) -> Sampled:
    """Sample from `logits` [K, V], any float type. ValueError if it has another number of rows.

    Greedy takes the highest logit, the lowest id among equals. Otherwise: temperature, then `top_k`, then
    `top_p` over what is left, as transformers and vLLM order them; equal logits rank by id.
    Every id is inside the vocabulary, that of a row with NaN too.
    """
    if logits.ndim != 2 or logits.shape[0] != batch.count:
        raise ValueError(f"logits {tuple(logits.shape)} for {batch.count} samples")
    finite = torch.isfinite(logits).all(dim=-1)
    logits = logits.float()
    ids = logits.argmax(dim=-1).to(torch.int32)
    if len(batch.drawing):
        ids[batch.drawing] = _draw(logits[batch.drawing], batch).to(torch.int32)
    chosen, top_ids, top = _logprobs(logits, ids, batch)
    return Sampled(ids, ~finite, chosen, top_ids, top)


def results(
    tensors: Mapping[str, torch.Tensor], params: Sequence[SamplingParams]
) -> tuple[TokenResult, ...]:
    """The samples of `Sampled.tensors()`, copied to the host, for the parameters they were made with.

    Where no sample reports, the three tensors of log-probabilities may be missing.

    ValueError if the tensors are of another number of samples.
    """
    if tensors["ids"].shape != (len(params),):
        raise ValueError(f"{tuple(tensors['ids'].shape)} ids for {len(params)} samples")
    ids, failed = tensors["ids"].tolist(), tensors["failed"].tolist()
    chosen, top_ids, top = (
        tensors[name].tolist() if name in tensors else []
        for name in ("logprobs", "top_ids", "top_logprobs")
    )
    found: list[TokenResult] = []
    reported = 0
    for number, each in enumerate(params):
        logprob: float | None = None
        pairs: tuple[tuple[int, float], ...] = ()
        if each.logprobs is not None and not failed[number]:
            logprob = chosen[reported]
            pairs = tuple(zip(top_ids[reported], top[reported], strict=True))[: each.logprobs]
        reported += each.logprobs is not None
        found.append(TokenResult(ids[number], failed[number], logprob, pairs))
    return tuple(found)


def _draw(logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
    """One id for each row, at the batch's place in the cumulated probability."""
    ranked, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    ranked = ranked.double()
    # less the maximum first: a tiny temperature must not overflow
    scaled = (ranked - ranked[:, :1]) / batch.temperature[:, None]
    rank = torch.arange(logits.shape[-1], device=logits.device)
    beyond = (batch.top_k[:, None] > 0) & (rank >= batch.top_k[:, None])
    chances = torch.softmax(scaled.masked_fill(beyond, -torch.inf), dim=-1)
    cumulated = chances.cumsum(dim=-1)
    # the shortest prefix that reaches top_p: a token stays if what is before it does not
    kept = ((cumulated - chances < batch.top_p[:, None]) & ~beyond).sum(dim=-1)
    kept = kept.clamp(min=1)
    total = cumulated.gather(1, kept[:, None] - 1)
    place = (cumulated <= batch.chance[:, None] * total).sum(dim=-1)
    place = torch.minimum(place, kept - 1)
    return order.gather(1, place[:, None]).squeeze(1)


def _logprobs(
    logits: torch.Tensor, ids: torch.Tensor, batch: SampleBatch
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the model's own distribution, before temperature and cuts."""
    if not len(batch.reporting):
        none = logits.new_empty(0, 0)
        return none.flatten(), none.to(torch.int32), none
    rows = torch.log_softmax(logits[batch.reporting], dim=-1)
    chosen = rows.gather(1, ids[batch.reporting].to(torch.int64)[:, None]).squeeze(1)
    many = min(batch.alternatives, logits.shape[-1])
    if not many:
        none = rows.new_empty(len(rows), 0)
        return chosen, none.to(torch.int32), none
    top, order = torch.sort(rows, dim=-1, descending=True, stable=True)
    return chosen, order[:, :many].to(torch.int32), top[:, :many].contiguous()
