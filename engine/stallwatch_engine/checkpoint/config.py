"""The architecture of one checkpoint, read from its `config.json` and checked once.

Sizes are grouped by the mechanism that uses them. Nothing is guessed: a field that this engine does not
know how to honour is refused by name (`UnsupportedModel`), a contradiction is a `BadCheckpoint`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from stallwatch_kernels.ple.layout import NgramLayout, NgramNumbers, ngram_layout

ARCHITECTURE = "Qwen4ExpForCausalLM"
MODEL_TYPE = "qwen4_exp_text"


class LayerKind(enum.Enum):
    """What mixes tokens in a decoder layer."""

    GDN = "linear_attention"  # GatedDeltaNet: a recurrent state per request
    QSA = "indexed_attention"  # sparse attention over paged keys and values


@dataclass(frozen=True, slots=True)
class GdnConfig:
    """GatedDeltaNet."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    gate: str  # activation of the output gate: "silu" or "sigmoid"

    @property
    def keys(self) -> int:
        """Width of all keys together; queries have the same."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of all values together."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the short convolution: queries, keys, values."""
        return 2 * self.keys + self.values


@dataclass(frozen=True, slots=True)
class QsaConfig:
    """Sparse attention and its indexer."""

    query_heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    index_heads: int
    index_dim: int
    budget: int  # tokens selected from complete blocks
    ratio: int  # tokens in a block

    @property
    def blocks(self) -> int:
        """Blocks that a query selects at most."""
        return self.budget // self.ratio

    @property
    def selected(self) -> int:
        """Tokens that a query reads at most: the budget and the causal tail of an open block."""
        return self.budget + self.ratio - 1


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Routed experts and the gated shared one."""

    experts: int
    top_k: int
    width: int
    shared_width: int
    renormalise: bool


@dataclass(frozen=True, slots=True)
class HyperConfig:
    """Hyper-connections: residual streams and the rank of their input mixer."""

    streams: int
    rank: int


@dataclass(frozen=True, slots=True)
class PleConfig:
    """Per-layer n-gram embeddings."""

    layers: tuple[int, ...]  # zero-based decoder layers, ascending
    conv_kernel: int
    numbers: NgramNumbers

    @property
    def embed_dim(self) -> int:
        """Width of all heads' rows together."""
        return self.numbers.embed_dim

    @property
    def conv_rows(self) -> int:
        """Earlier rows that the convolution reads; its dilation is the longest n-gram."""
        return (self.conv_kernel - 1) * self.numbers.ngram_size

    @property
    def context(self) -> int:
        """Earlier token ids that an n-gram reads."""
        return self.numbers.ngram_size - 1

    def layout(self, layer: int) -> NgramLayout:
        """The table of decoder layer `layer`; KeyError if it has none."""
        if layer not in self.layers:
            raise KeyError(layer)
        return ngram_layout(self.numbers, self.layers.index(layer))


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The whole text model."""

    vocab: int
    hidden: int
    layers: tuple[LayerKind, ...]
    max_position: int
    eps: float
    eos: tuple[int, ...]
    pad: int | None
    tied: bool
    dtype: str
    gdn: GdnConfig
    qsa: QsaConfig
    moe: MoeConfig
    hyper: HyperConfig
    ple: PleConfig | None

    @property
    def residual(self) -> int:
        """Width of all residual streams together."""
        return self.hyper.streams * self.hidden

    def layers_of(self, kind: LayerKind) -> tuple[int, ...]:
        """Zero-based indices of the layers of one kind; a layer's store is its position herein."""
        return tuple(index for index, each in enumerate(self.layers) if each is kind)
