"""A model's weights in memory, as the forward pass wants them: typed, by layer, experts stacked.

PLE tables are not among them: a backend opens those parts (`CheckpointView.table`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from stallwatch_engine.checkpoint.config import LayerKind, ModelConfig
from stallwatch_engine.checkpoint.expected import (
    EMBED,
    HEAD,
    MIXER,
    expected_tensors,
    layer_prefix,
    table_prefix,
)
from stallwatch_engine.checkpoint.view import CheckpointView

Tensor: TypeAlias = torch.Tensor


@dataclass(frozen=True, slots=True)
class HyperWeights:
    """A hyper-connection. S streams, H hidden, r rank. The final mixer has no `inject`."""

    norm: Tensor  # [S*H]
    down: Tensor  # [r, S*H]
    up: Tensor  # [S*H, r]
    inject: Tensor | None  # [S, S*H]


@dataclass(frozen=True, slots=True)
class GdnWeights:
    """GatedDeltaNet. C channels in the order queries, keys, values; Hv value heads."""

    a_log: Tensor  # float32[Hv], always
    dt_bias: Tensor  # float32[Hv], always
    conv: Tensor  # [C, kernel]
    in_a: Tensor  # [Hv, H]
    in_b: Tensor  # [Hv, H]
    in_qkv: Tensor  # [C, H]
    in_z: Tensor  # [Hv*dv, H]
    norm: Tensor  # [dv], plain weight (not 1 + w)
    out: Tensor  # [H, Hv*dv]


@dataclass(frozen=True, slots=True)
class QsaWeights:
    """Sparse attention and its indexer. Norms are (1 + w)."""

    q: Tensor  # [Hq*2*d, H]: per head the query, then its gate
    k: Tensor  # [Hkv*d, H]
    v: Tensor  # [Hkv*d, H]
    out: Tensor  # [H, Hq*d]
    q_norm: Tensor  # [d]
    k_norm: Tensor  # [d]
    index_qk: Tensor  # [(Hi+1)*di, H]: all query heads, then the one key head
    index_q_norm: Tensor  # [di]
    index_k_norm: Tensor  # [di]


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """E routed experts of width I, and the shared one behind its gate."""

    router: Tensor  # [E, H]
    gate_up: Tensor  # [E, 2*I, H]: gate rows, then up rows
    down: Tensor  # [E, H, I]
    shared_gate_up: Tensor  # [2*Is, H]
    shared_down: Tensor  # [H, Is]
    shared_scale: Tensor  # [1, H]: its sigmoid scales the shared expert


@dataclass(frozen=True, slots=True)
class PleWeights:
    """What a PLE layer does with its embeddings [.., E]."""

    key: Tensor  # [S*H, E]
    value: Tensor  # [H, E]
    norm_key: Tensor  # [S*H]
    norm_query: Tensor  # [S*H]
    norm_conv: Tensor  # [S*H]
    conv: Tensor  # [S*H, kernel]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. `mixer` is GdnWeights or QsaWeights as the layer's kind says."""

    kind: LayerKind
    attn_hyper: HyperWeights
    mixer: GdnWeights | QsaWeights
    mlp_hyper: HyperWeights
    moe: MoeWeights
    ple: PleWeights | None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All of it. With tied embeddings `head` is `embed` itself."""

    config: ModelConfig
    embed: Tensor  # [V, H]
    layers: tuple[LayerWeights, ...]
    mixer: HyperWeights
    head: Tensor  # [V, H]


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far a load is, said after each tensor."""

    tensor: str
    file: str
    tensors: int
    tensors_total: int
    nbytes: int
    nbytes_total: int


Progress = Callable[[LoadProgress], None]


def load_weights(
    view: CheckpointView,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> ModelWeights:
    """Read all weights but the PLE tables, cast to `dtype`. Raises BadCheckpoint."""
    reader = _Reader(view, dtype, torch.device(device), progress)
    config = view.config
    embed = reader.take(EMBED)
    layers = tuple(_layer(reader, config, layer) for layer in range(len(config.layers)))
    mixer = _hyper(reader, MIXER, inject=False)
    head = embed if config.tied else reader.take(HEAD)
    return ModelWeights(config, embed, layers, mixer, head)


class _Reader:
    """Reads tensors by name, casts and moves them, and says so."""

    def __init__(
        self,
        view: CheckpointView,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self._view = view
        self._progress = progress
        wanted = [
            view.info(name) for name in expected_tensors(view.config) if f".{_TABLES}." not in name
        ]
        self._total = len(wanted), sum(each.nbytes for each in wanted)
        self._done = 0, 0

    def take(self, name: str) -> Tensor:
        """A tensor of its own memory."""
        info = self._view.info(name)
        # a copy always: without a cast the tensor would still lie in the mapped file
        found = self._view.read(name).to(device=self.device, dtype=self.dtype, copy=True)
        self._done = self._done[0] + 1, self._done[1] + info.nbytes
        if self._progress is not None:
            self._progress(
                LoadProgress(
                    tensor=name,
                    file=info.path.name,
                    tensors=self._done[0],
                    tensors_total=self._total[0],
                    nbytes=self._done[1],
                    nbytes_total=self._total[1],
                )
            )
        return found.contiguous()

    def empty(self, *shape: int) -> Tensor:
        """Room for tensors that are stored one by one."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)


_TABLES = table_prefix(0).rpartition(".")[2]


def _layer(reader: _Reader, config: ModelConfig, layer: int) -> LayerWeights:
    prefix = layer_prefix(layer)
    kind = config.layers[layer]
    has_ple = config.ple is not None and layer in config.ple.layers
    return LayerWeights(
        kind=kind,
        attn_hyper=_hyper(reader, f"{prefix}.attn_hyper_connection", inject=True),
        mixer=(
            _gdn(reader, f"{prefix}.linear_attn")
            if kind is LayerKind.GDN
            else _qsa(reader, f"{prefix}.self_attn")
        ),
        mlp_hyper=_hyper(reader, f"{prefix}.mlp_hyper_connection", inject=True),
        moe=_moe(reader, config, f"{prefix}.mlp"),
        ple=_ple(reader, f"{prefix}.ple") if has_ple else None,
    )


def _hyper(reader: _Reader, prefix: str, *, inject: bool) -> HyperWeights:
    return HyperWeights(
        norm=reader.take(f"{prefix}.hc_norm.weight"),
        down=reader.take(f"{prefix}.input_mix_weight_down.weight"),
        up=reader.take(f"{prefix}.input_mix_weight_up.weight"),
        inject=reader.take(f"{prefix}.block_inject_weight.weight") if inject else None,
    )


def _gdn(reader: _Reader, prefix: str) -> GdnWeights:
    return GdnWeights(
        # rounded to the model's type first, as the reference model holds them
        a_log=reader.take(f"{prefix}.A_log").float(),
        dt_bias=reader.take(f"{prefix}.dt_bias").float(),
        conv=reader.take(f"{prefix}.conv1d.weight").squeeze(1),
        in_a=reader.take(f"{prefix}.in_proj_a.weight"),
        in_b=reader.take(f"{prefix}.in_proj_b.weight"),
        in_qkv=reader.take(f"{prefix}.in_proj_qkv.weight"),
        in_z=reader.take(f"{prefix}.in_proj_z.weight"),
        norm=reader.take(f"{prefix}.norm.weight"),
        out=reader.take(f"{prefix}.out_proj.weight"),
    )


def _qsa(reader: _Reader, prefix: str) -> QsaWeights:
    return QsaWeights(
        q=reader.take(f"{prefix}.q_proj.weight"),
        k=reader.take(f"{prefix}.k_proj.weight"),
        v=reader.take(f"{prefix}.v_proj.weight"),
        out=reader.take(f"{prefix}.o_proj.weight"),
        q_norm=reader.take(f"{prefix}.q_norm.weight"),
        k_norm=reader.take(f"{prefix}.k_norm.weight"),
        index_qk=reader.take(f"{prefix}.indexer.index_qk_proj.weight"),
        index_q_norm=reader.take(f"{prefix}.indexer.q_layernorm.weight"),
        index_k_norm=reader.take(f"{prefix}.indexer.k_layernorm.weight"),
    )


def _moe(reader: _Reader, config: ModelConfig, prefix: str) -> MoeWeights:
    moe, hidden = config.moe, config.hidden
    gate_up = reader.empty(moe.experts, 2 * moe.width, hidden)
    down = reader.empty(moe.experts, hidden, moe.width)
    for expert in range(moe.experts):
        each = f"{prefix}.experts.{expert}"
        gate_up[expert, : moe.width] = reader.take(f"{each}.gate_proj.weight")
        gate_up[expert, moe.width :] = reader.take(f"{each}.up_proj.weight")
        down[expert] = reader.take(f"{each}.down_proj.weight")
    shared = f"{prefix}.shared_expert"
    return MoeWeights(
        router=reader.take(f"{prefix}.gate.weight"),
        gate_up=gate_up,
        down=down,
        shared_gate_up=torch.cat(
            [
                reader.take(f"{shared}.gate_proj.weight"),
                reader.take(f"{shared}.up_proj.weight"),
            ]
        ),
        shared_down=reader.take(f"{shared}.down_proj.weight"),
        shared_scale=reader.take(f"{prefix}.shared_expert_gate.weight"),
    )


def _ple(reader: _Reader, prefix: str) -> PleWeights:
    return PleWeights(
        key=reader.take(f"{prefix}.key_proj.weight"),
        value=reader.take(f"{prefix}.value_proj.weight"),
        norm_key=reader.take(f"{prefix}.norm_key.weight"),
        norm_query=reader.take(f"{prefix}.norm_query.weight"),
        norm_conv=reader.take(f"{prefix}.norm_conv.weight"),
        conv=reader.take(f"{prefix}.conv1d.weight").squeeze(1),
    )
