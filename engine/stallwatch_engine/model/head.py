"""Both ends of the model: token embeddings into the streams, and logits out of them, for sampled rows alone."""

from __future__ import annotations

from collections.abc import Callable

import torch

from stallwatch_engine.checkpoint.weights import ModelWeights
from stallwatch_engine.model.buffers import Activations, StepBuffers
from stallwatch_engine.model.hyper import mixer
from stallwatch_kernels.linear.skinny import Linear
from stallwatch_kernels.pool import RowPool


def bind_embed(
    weights: ModelWeights, inputs: StepBuffers, act: Activations
) -> Callable[[int], None]:
    """Every stream begins as the token's embedding."""
    table, streams = weights.embed, weights.config.hyper.streams
    split = act.h.unflatten(1, (streams, -1))

    def run(tokens: int) -> None:
        torch.index_select(table, 0, inputs.ids[:tokens], out=act.y[:tokens])
        split[:tokens] = act.y[:tokens, None]

    return run


def bind_logits(
    weights: ModelWeights, inputs: StepBuffers, act: Activations, *, pool: RowPool
) -> Callable[[int], torch.Tensor]:
    """The logits [K, V] of the first K samples: a view of a static buffer."""
    config, most = weights.config, inputs.requests
    kind = {"dtype": act.h.dtype}
    rows = torch.zeros(most, config.residual, **kind)
    folded = torch.zeros(most, config.hidden, **kind)
    logits = torch.zeros(most, config.vocab, **kind)
    fold = mixer(config, weights.mixer, pool).bind_read(rows, folded)
    head = Linear(weights.head, pool=pool).bind(folded, logits)

    def run(samples: int) -> torch.Tensor:
        if not samples:  # a step in the middle of prompts
            return logits[:0]
        torch.index_select(act.h, 0, inputs.sampled[:samples], out=rows[:samples])
        fold(samples)
        head(samples)
        return logits[:samples]

    return run
