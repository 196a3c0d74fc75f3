"""`config.json` to `ModelConfig`: every constraint of the architecture, every refusal by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from stallwatch_engine.checkpoint.config import (
    ARCHITECTURE,
    MODEL_TYPE,
    GdnConfig,
    HyperConfig,
    LayerKind,
    ModelConfig,
    MoeConfig,
    PleConfig,
    QsaConfig,
)
from stallwatch_engine.checkpoint.errors import BadCheckpoint, UnsupportedModel
from stallwatch_kernels.ple.layout import NgramNumbers

DTYPES: Final = ("float32", "bfloat16")
_MTP: Final = ("num_nextn_predict_layers", "num_nextn", "mtp_num_hidden_layers", "mtp_num_layers")
_MOST: Final = (1 << 31) - 1
_MAX_BYTES: Final = 4 << 20  # of a config.json; a released one has 3 KiB


class Fields:
    """One JSON object, read by type. Errors name the file and the field."""

    def __init__(self, values: Mapping[str, Any], file: str) -> None:
        self.values = values
        self.file = file

    def get(self, name: str, default: Any = None) -> Any:
        """The value, or the default where it is absent or null."""
        value = self.values.get(name)
        return default if value is None else value

    def size(
        self, name: str, default: int | None = None, *, least: int = 1, most: int = _MOST
    ) -> int:
        """An integer from `least` to `most`: nothing is allocated or listed by an absurd number."""
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.bad(f"{name} must be an integer from {least} to {most}, got {_short(value)}")
        return value

    def real(self, name: str, default: float) -> float:
        """A positive number."""
        value = self.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
            raise self.bad(f"{name} must be a positive number, got {_short(value)}")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """True or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.bad(f"{name} must be true or false, got {_short(value)}")
        return value

    def nested(self, name: str) -> Fields:
        """The object in a field; an empty one where it is absent."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise self.bad(f"{name} must be an object, got {_short(value)}")
        return Fields(value, self.file)

    def require(self, holds: bool, problem: str) -> None:
        """Refuse the file unless the constraint holds."""
        if not holds:
            raise self.bad(problem)

    def bad(self, problem: str) -> BadCheckpoint:
        """The error, to be raised."""
        return BadCheckpoint(problem, file=self.file)

    def unsupported(self, feature: str) -> UnsupportedModel:
        """The refusal, to be raised."""
        return UnsupportedModel(feature, file=self.file)


def read_config(path: Path) -> ModelConfig:
    """The configuration in the file `path`. Raises BadCheckpoint or UnsupportedModel."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except OSError as exc:
        raise BadCheckpoint(f"cannot be read ({exc.strerror})", file=str(path)) from exc
    if len(raw) > _MAX_BYTES:
        raise BadCheckpoint(f"has more than {_MAX_BYTES} bytes", file=str(path))
    try:
        values = json.loads(raw)
    except ValueError as exc:  # UnicodeDecodeError is one
        raise BadCheckpoint(f"is no JSON ({exc})", file=str(path)) from exc
    if not isinstance(values, dict):
        raise BadCheckpoint("is no JSON object", file=str(path))
    return parse_config(values, file=str(path))


def parse_config(values: Mapping[str, Any], *, file: str = "config.json") -> ModelConfig:
    """The configuration in a decoded `config.json`; `file` is what errors name."""
    fields = Fields(values, file)
    _refuse(fields)
    kinds = _layers(fields)
    eos = _token_ids(fields)
    hidden = fields.size("hidden_size")
    vocab = fields.size("vocab_size")
    fields.require(
        all(0 <= t < vocab for t in eos), f"eos_token_id {_short(eos)} is outside of vocab_size"
    )
    pad = fields.get("pad_token_id")
    return ModelConfig(
        vocab=vocab,
        hidden=hidden,
        layers=kinds,
        max_position=fields.size("max_position_embeddings"),
        eps=fields.real("rms_norm_eps", 1e-6),
        eos=eos,
        pad=None if pad is None else fields.size("pad_token_id", least=0),
        tied=fields.flag("tie_word_embeddings", default=False),
        dtype=_dtype(fields),
        gdn=_gdn(fields),
        qsa=_qsa(fields),
        moe=_moe(fields),
        hyper=HyperConfig(fields.size("hc_count", 4, least=2), fields.size("hc_lowrank", 320)),
        ple=_ple(fields, kinds, eos),
    )


def _refuse(fields: Fields) -> None:
    """What this engine would have to ignore, by name."""
    architectures = fields.get("architectures", [])
    if not isinstance(architectures, list) or architectures != [ARCHITECTURE]:
        raise fields.unsupported(f"architectures {_short(architectures)} (only [{ARCHITECTURE!r}])")
    if fields.get("model_type") != MODEL_TYPE:
        raise fields.unsupported(
            f"model_type {_short(fields.get('model_type'))} (only {MODEL_TYPE!r})"
        )
    for name in _MTP:
        if fields.get(name, 0):
            raise fields.unsupported(f"multi-token prediction ({name}={_short(fields.get(name))})")
    quantised = fields.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise fields.unsupported(f"quantization_config with quant_method {_short(method)}")
    if fields.flag("attention_bias", default=False):
        raise fields.unsupported("attention_bias=true")
    if fields.get("sliding_window"):
        raise fields.unsupported(f"sliding_window={_short(fields.get('sliding_window'))}")
    if fields.get("hidden_act", "silu") != "silu":
        raise fields.unsupported(f"hidden_act={_short(fields.get('hidden_act'))}")


def _layers(fields: Fields) -> tuple[LayerKind, ...]:
    count = fields.size("num_hidden_layers", most=1024)
    names = fields.get("layer_types")
    if names is None:
        every = fields.size("full_attention_interval", 4)
        return tuple(LayerKind.GDN if (i + 1) % every else LayerKind.QSA for i in range(count))
    if not isinstance(names, list) or len(names) != count:
        raise fields.bad(f"layer_types must name all {count} layers")
    kinds = {kind.value: kind for kind in LayerKind}
    kinds["full_attention"] = LayerKind.QSA  # the released checkpoint's word for the same layer
    for name in names:
        if not isinstance(name, str) or name not in kinds:
            raise fields.unsupported(f"layer type {_short(name)}")
    return tuple(kinds[name] for name in names)


def _token_ids(fields: Fields) -> tuple[int, ...]:
    value = fields.get("eos_token_id", [])
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
        raise fields.bad(f"eos_token_id must be an integer or a list of them, got {_short(value)}")
    return tuple(ids)


def _dtype(fields: Fields) -> str:
    dtype = fields.get("dtype", fields.get("torch_dtype", "float32"))
    if dtype not in DTYPES:
        raise fields.unsupported(f"dtype {_short(dtype)}")
    return str(dtype)


def _gdn(fields: Fields) -> GdnConfig:
    gate = fields.get("output_gate_type", "silu")
    if gate not in ("silu", "sigmoid"):
        raise fields.unsupported(f"output_gate_type={_short(gate)}")
    gdn = GdnConfig(
        key_heads=fields.size("linear_num_key_heads", 16),
        value_heads=fields.size("linear_num_value_heads", 32),
        key_dim=fields.size("linear_key_head_dim", 128),
        value_dim=fields.size("linear_value_head_dim", 128),
        conv_kernel=fields.size("linear_conv_kernel_dim", 4, least=2),
        gate=gate,
    )
    fields.require(
        gdn.value_heads % gdn.key_heads == 0,
        f"linear_num_value_heads {gdn.value_heads} is no multiple of linear_num_key_heads {gdn.key_heads}",
    )
    return gdn


def _qsa(fields: Fields) -> QsaConfig:
    rope = fields.nested("rope_parameters")
    if rope.get("rope_type", "default") != "default":
        raise fields.unsupported(f"rope_type {_short(rope.get('rope_type'))}")
    if fields.size("indexer_kv_heads") != 1:
        raise fields.unsupported(
            f"indexer_kv_heads={_short(fields.get('indexer_kv_heads'))} (only 1)"
        )
    head_dim = fields.size("head_dim", 256)
    qsa = QsaConfig(
        query_heads=fields.size("num_attention_heads"),
        kv_heads=fields.size("num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=int(head_dim * rope.real("partial_rotary_factor", 1.0)),
        rope_theta=rope.real("rope_theta", 10000.0),
        index_heads=fields.size("indexer_n_heads"),
        index_dim=fields.size("indexer_head_dim"),
        budget=fields.size("indexer_budget"),
        ratio=fields.size("indexer_compress_ratio"),
    )
    fields.require(
        qsa.budget % qsa.ratio == 0,
        f"indexer_budget {qsa.budget} is no multiple of indexer_compress_ratio {qsa.ratio}",
    )
    fields.require(
        0 < qsa.rotary_dim <= min(qsa.index_dim, qsa.head_dim) and qsa.rotary_dim % 2 == 0,
        f"the rotary width {qsa.rotary_dim} must be even and fit head_dim and indexer_head_dim",
    )
    fields.require(
        qsa.query_heads % qsa.kv_heads == 0,
        f"num_attention_heads {qsa.query_heads} is no multiple of num_key_value_heads {qsa.kv_heads}",
    )
    return qsa


def _moe(fields: Fields) -> MoeConfig:
    moe = MoeConfig(
        experts=fields.size("num_experts", most=1 << 16),
        top_k=fields.size("num_experts_per_tok"),
        width=fields.size("moe_intermediate_size"),
        shared_width=fields.size("shared_expert_intermediate_size"),
        renormalise=fields.flag("norm_topk_prob", default=True),
    )
    fields.require(moe.top_k <= moe.experts, "num_experts_per_tok is more than num_experts")
    return moe


def _ple(fields: Fields, kinds: tuple[LayerKind, ...], eos: tuple[int, ...]) -> PleConfig | None:
    ids = fields.get("ple_layer_ids", [])
    if not isinstance(ids, list) or not all(type(each) is int for each in ids):
        raise fields.bad(f"ple_layer_ids must be a list of integers, got {_short(ids)}")
    if not ids:
        return None
    layers = tuple(sorted({each - 1 for each in ids}))  # the file counts from one
    for layer in layers:
        fields.require(0 <= layer < len(kinds), f"ple_layer_ids names no layer {layer + 1}")
        fields.require(
            kinds[layer] is LayerKind.GDN, f"PLE layer {layer + 1} is no linear_attention layer"
        )
    fields.require(bool(eos), "eos_token_id must be set: it cuts the n-grams of PLE layers")
    numbers = {
        "vocab_size": fields.size("vocab_size"),
        "embed_dim": fields.size("ple_embed_dim", fields.size("hidden_size")),
        "ngram_size": fields.size("ngram_size", 3, least=2, most=16),
        "heads_per_ngram": fields.size("heads_per_ngram", 8, most=1024),
        "vocab_base": fields.size("ngram_vocab_size_base", 20_000_000, least=2),
        "divisible_by": fields.size("make_ngram_vocab_size_divisible_by", 128),
        "seed": fields.size("seed", 1234, least=0, most=(1 << 63) - 1),
        "parts": fields.size("split_ngram_parts", 512, most=1 << 16),
    }
    heads = (numbers["ngram_size"] - 1) * numbers["heads_per_ngram"]
    fields.require(
        numbers["embed_dim"] % heads == 0,
        f"ple_embed_dim {numbers['embed_dim']} is no multiple of the {heads} n-gram heads",
    )
    return PleConfig(
        layers=layers,
        conv_kernel=fields.size("ple_conv_kernel_size", 4, least=2),
        numbers=NgramNumbers(eos=eos[0], **numbers),
    )


def _short(value: object) -> str:
    """The value for a message, cut where it is long."""
    text = f"{value!r:.60}"
    return text if len(text) < 60 else text + "..."
