"""The whole model over a packed step: static inputs in, logits of the sampled rows out.

In two parts, because rows of the n-gram tables arrive while the layers before them are computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stallwatch_engine.checkpoint.config import LayerKind
from stallwatch_engine.checkpoint.weights import (
    GdnWeights,
    LayerWeights,
    ModelWeights,
    QsaWeights,
)
from stallwatch_engine.model.buffers import Activations, Run, StepBuffers
from stallwatch_engine.model.gdn import GdnScratch, bind_gdn
from stallwatch_engine.model.head import bind_embed, bind_logits
from stallwatch_engine.model.hyper import bind_hyper
from stallwatch_engine.model.moe import MoeScratch, bind_moe
from stallwatch_engine.model.ple import PleScratch, bind_ple
from stallwatch_engine.model.qsa import QsaScratch, bind_qsa
from stallwatch_engine.state.stores import GdnStore, QsaStore, StateStores
from stallwatch_kernels.pool import SERIAL, RowPool


@dataclass(frozen=True, slots=True)
class _Scratch:
    gdn: GdnScratch
    qsa: QsaScratch
    moe: MoeScratch
    ple: PleScratch


class Forward:
    """Bound once to weights, stores and inputs. One step at a time, in one thread."""

    def __init__(
        self,
        weights: ModelWeights,
        stores: StateStores,
        inputs: StepBuffers,
        *,
        pool: RowPool = SERIAL,
    ) -> None:
        config, tokens, dtype = weights.config, inputs.tokens, weights.embed.dtype
        self.config = config
        self.inputs = inputs
        self._stores = stores
        self._pool = pool
        self.act = Activations.empty(config, tokens, dtype)
        self._scratch = _Scratch(
            GdnScratch(config, tokens, dtype),
            QsaScratch(config, tokens, dtype),
            MoeScratch(config, self.act),
            PleScratch(config, tokens, dtype),
        )
        self._embed = bind_embed(weights, inputs, self.act)
        self._logits = bind_logits(weights, inputs, self.act, pool=pool)
        bound = [self._layer(index, layer) for index, layer in enumerate(weights.layers)]
        first = config.ple.layers[0] if config.ple is not None and config.ple.layers else len(bound)
        self._before = [run for layer in bound[:first] for run in layer]
        self._after = [run for layer in bound[first:] for run in layer]

    @property
    def rows(self) -> torch.Tensor:
        """[L, T, E]: where the n-gram rows of a step are to be put before `finish`."""
        return self.act.ple

    def begin(self, tokens: int, requests: int) -> None:
        """Embeddings, and the layers before the first one that needs n-gram rows."""
        self._embed(tokens)
        for run in self._before:
            run(tokens, requests)

    def finish(self, tokens: int, requests: int, samples: int) -> torch.Tensor:
        """The other layers; logits [samples, V], valid until the next step."""
        for run in self._after:
            run(tokens, requests)
        return self._logits(samples)

    def _layer(self, index: int, weights: LayerWeights) -> list[Run]:
        """In order: PLE, then the mixer and the experts, each inside its hyper-connection."""
        config, act, pool = self.config, self.act, self._pool
        runs: list[Run] = []
        if weights.ple is not None:
            assert config.ple is not None
            store = self._stores.layers[index]
            assert isinstance(store, GdnStore)
            runs.append(
                bind_ple(
                    config,
                    weights.ple,
                    store,
                    self.inputs,
                    act,
                    self._scratch.ple,
                    ordinal=config.ple.layers.index(index),
                    pool=pool,
                )
            )
        runs.append(
            bind_hyper(config, weights.attn_hyper, act, self._mixer(index, weights), pool=pool)
        )
        experts = bind_moe(config, weights.moe, act, self._scratch.moe, pool=pool)
        runs.append(bind_hyper(config, weights.mlp_hyper, act, experts, pool=pool))
        return runs

    def _mixer(self, index: int, weights: LayerWeights) -> Run:
        config, store, inputs, act = self.config, self._stores.layers[index], self.inputs, self.act
        if weights.kind is LayerKind.GDN:
            assert isinstance(store, GdnStore)
            assert isinstance(weights.mixer, GdnWeights)
            scratch = self._scratch.gdn
            return bind_gdn(config, weights.mixer, store, inputs, act, scratch, pool=self._pool)
        assert isinstance(store, QsaStore)
        assert isinstance(weights.mixer, QsaWeights)
        return bind_qsa(
            config,
            weights.mixer,
            store,
            inputs,
            act,
            self._scratch.qsa,
            stores=self._stores,
            pool=self._pool,
        )
