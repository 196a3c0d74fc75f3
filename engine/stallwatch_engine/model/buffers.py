"""What blocks read and write: static tensors, so that a step's addresses are those of every other step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from stallwatch_engine.checkpoint.config import ModelConfig
from stallwatch_engine.state.pages import NULL

Run: TypeAlias = Callable[[int, int], None]
"""A bound block: computes the first T tokens of the first R requests."""


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """A step's inputs on the device. A request is named by its slot, so that states need no gathering."""

    ids: torch.Tensor  # int32[T]
    positions: torch.Tensor  # int32[T]
    owner: torch.Tensor  # int32[T]: the slot of each token's request; NULL for padding
    starts: torch.Tensor  # int32[R + 1]
    slots: torch.Tensor  # int32[R]
    context: torch.Tensor  # int32[R, n - 1]: ids before the step, for n-grams
    sampled: torch.Tensor  # int64[R]: the token that each sample's logits come from
    seq_lens: torch.Tensor  # int32[slots]: by slot; true for the requests of this step

    @classmethod
    def empty(
        cls,
        config: ModelConfig,
        *,
        tokens: int,
        requests: int,
        slots: int,
        device: torch.device | str = "cpu",
    ) -> StepBuffers:
        """For steps of at most `tokens` tokens and `requests` requests, over `slots` states."""
        older = config.ple.context if config.ple is not None else 0

        def room(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            ids=room(tokens),
            positions=room(tokens),
            owner=room(tokens).fill_(NULL),
            starts=room(requests + 1),
            slots=room(requests).fill_(NULL),
            context=room(requests, older),
            sampled=room(requests, dtype=torch.int64),
            seq_lens=room(slots),
        )

    @property
    def tokens(self) -> int:
        """Most tokens of a step."""
        return len(self.ids)

    @property
    def requests(self) -> int:
        """Most requests of a step."""
        return len(self.slots)


@dataclass(frozen=True, slots=True)
class Activations:
    """What every layer uses: the residual streams, a block's input and output, and injection weights."""

    h: torch.Tensor  # [T, S * H]
    x: torch.Tensor  # [T, H]
    y: torch.Tensor  # [T, H]
    gains: torch.Tensor  # float32[T, S]
    ple: torch.Tensor  # [L, T, E]: the rows of each PLE layer

    @classmethod
    def empty(cls, config: ModelConfig, tokens: int, dtype: torch.dtype) -> Activations:
        """For steps of at most `tokens` tokens."""
        layers = len(config.ple.layers) if config.ple is not None else 0
        embed = config.ple.embed_dim if config.ple is not None else 0
        return cls(
            h=torch.zeros(tokens, config.residual, dtype=dtype),
            x=torch.zeros(tokens, config.hidden, dtype=dtype),
            y=torch.zeros(tokens, config.hidden, dtype=dtype),
            gains=torch.zeros(tokens, config.hyper.streams),
            ple=torch.zeros(layers, tokens, embed, dtype=dtype),
        )
