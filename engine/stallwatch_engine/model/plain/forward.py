"""The whole model in torch. No bits are promised across batches here, as none are by torch's products."""

from __future__ import annotations

import torch
from torch.nn.functional import linear, silu

from stallwatch_engine.checkpoint.weights import (
    GdnWeights,
    HyperWeights,
    LayerWeights,
    ModelWeights,
    MoeWeights,
    PleWeights,
    QsaWeights,
)
from stallwatch_engine.model.buffers import StepBuffers
from stallwatch_engine.model.plain.gdn import gdn
from stallwatch_engine.model.plain.qsa import PlainQsa
from stallwatch_engine.model.plain.step import Step
from stallwatch_engine.state.stores import GdnStore, QsaStore, StateStores
from stallwatch_kernels.gdn.batch import Carried
from stallwatch_kernels.hc.reference import Weights, read, write
from stallwatch_kernels.moe.reference import routed_reference
from stallwatch_kernels.moe.route import route_reference
from stallwatch_kernels.ple import conv as ple_conv
from stallwatch_kernels.ple import gate as ple_gate
from stallwatch_kernels.qsa.rotary import Rotary


class PlainForward:
    """The same two calls as `Forward`, on the device of the stores."""

    def __init__(self, weights: ModelWeights, stores: StateStores, inputs: StepBuffers) -> None:
        config = weights.config
        self.config, self.inputs = config, inputs
        self._weights, self._stores = weights, stores
        ple = config.ple
        shape = (0, 0) if ple is None else (len(ple.layers), ple.embed_dim)
        table = stores.tables.entries
        self.rows = torch.zeros(
            shape[0], inputs.tokens, shape[1], dtype=weights.embed.dtype, device=table.device
        )
        rotary = Rotary(config.qsa.rotary_dim, config.qsa.rope_theta, config.max_position)
        self._attention = {
            index: PlainQsa(config, layer.mixer, store, table=table[:-1], rotary=rotary)
            for index, layer in enumerate(weights.layers)
            if isinstance(layer.mixer, QsaWeights)
            and isinstance(store := stores.layers[index], QsaStore)
        }
        self._first = ple.layers[0] if ple is not None and ple.layers else len(weights.layers)
        self._step = Step.of(inputs, 1, 1)
        self._h = self.rows

    def begin(self, tokens: int, requests: int) -> None:
        """Embeddings, and the layers before the first one that needs n-gram rows."""
        self._step = Step.of(self.inputs, tokens, requests)
        embedded = self._weights.embed[self.inputs.ids[:tokens].long()]
        self._h = embedded.repeat(1, self.config.hyper.streams)
        for index in range(self._first):
            self._layer(index, self._weights.layers[index])

    def finish(self, _tokens: int, _requests: int, samples: int) -> torch.Tensor:
        """The other layers; logits [samples, V]."""
        for index in range(self._first, len(self._weights.layers)):
            self._layer(index, self._weights.layers[index])
        rows = self._h[self.inputs.sampled[:samples]]
        folded, _ = read(rows, self._mix(self._weights.mixer))
        return linear(folded, self._weights.head)

    def _layer(self, index: int, weights: LayerWeights) -> None:
        store, step = self._stores.layers[index], self._step
        if weights.ple is not None:
            assert isinstance(store, GdnStore)
            self._h = self._h + self._ple(index, weights.ple, store)

        def mixed(x: torch.Tensor) -> torch.Tensor:
            if isinstance(weights.mixer, GdnWeights):
                assert isinstance(store, GdnStore)
                return gdn(self.config, weights.mixer, store, step, x=x)
            return self._attention[index](step, x)

        for around, block in (
            (weights.attn_hyper, mixed),
            (weights.mlp_hyper, lambda x: self._experts(weights.moe, x)),
        ):
            x, injection = read(self._h, self._mix(around))
            assert injection is not None
            self._h = write(self._h, block(x), injection)

    def _mix(self, weights: HyperWeights) -> Weights:
        parts = weights.down, weights.up, weights.norm, weights.inject
        return Weights(*parts, self.config.hyper.streams, self.config.eps)

    def _experts(self, weights: MoeWeights, x: torch.Tensor) -> torch.Tensor:
        moe = self.config.moe
        logits = linear(x, weights.router)
        shares, ids = route_reference(logits, moe.top_k, renormalise=moe.renormalise)
        routed = routed_reference(x, ids, shares, weights.gate_up, weights.down)
        gate, up = linear(x, weights.shared_gate_up).chunk(2, -1)
        shared = linear(silu(gate) * up, weights.shared_down)
        return routed + torch.sigmoid(linear(x, weights.shared_scale)) * shared

    def _ple(self, index: int, weights: PleWeights, store: GdnStore) -> torch.Tensor:
        ple, step = self.config.ple, self._step
        assert ple is not None
        assert store.ple_conv is not None
        rows = self.rows[ple.layers.index(index), : step.tokens]
        norms = ple_gate.GateWeights(
            weights.norm_key,
            weights.norm_query,
            weights.norm_conv,
            self.config.hyper.streams,
            self.config.eps,
        )
        keys, values = linear(rows, weights.key), linear(rows, weights.value)
        u, c = ple_gate.reference(norms, keys, values, self._h)
        carried = Carried(store.ple_conv, step.slots, step.starts)
        return ple_conv.reference(weights.conv, ple.numbers.ngram_size, u, c, carried=carried)
