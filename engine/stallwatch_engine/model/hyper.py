"""Hyper-connections: a block reads a mix of the residual streams and is written back into each of them."""

from __future__ import annotations

from collections.abc import Callable

from stallwatch_engine.checkpoint.config import ModelConfig
from stallwatch_engine.checkpoint.weights import HyperWeights
from stallwatch_engine.model.buffers import Activations, Run
from stallwatch_kernels.hc.mixer import Mixer
from stallwatch_kernels.hc.reference import Weights
from stallwatch_kernels.pool import RowPool


def mixer(config: ModelConfig, weights: HyperWeights, pool: RowPool) -> Mixer:
    """The kernel of one hyper-connection."""
    parts = weights.down, weights.up, weights.norm, weights.inject
    return Mixer(Weights(*parts, config.hyper.streams, config.eps), pool)


def bind_hyper(
    config: ModelConfig, weights: HyperWeights, act: Activations, block: Run, *, pool: RowPool
) -> Run:
    """Sets x = read(h); y = block(x); h += injection * y, with the injection that the same read gave."""
    connection = mixer(config, weights, pool)
    read: Callable[[int], None] = connection.bind_read(act.h, act.x, act.gains)
    write: Callable[[int], None] = connection.bind_write(act.h, act.y, act.gains)

    def run(tokens: int, requests: int) -> None:
        read(tokens)
        block(tokens, requests)
        write(tokens)

    return run
