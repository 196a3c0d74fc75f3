"""Every tensor that a checkpoint of a given configuration must hold: name and shape, nothing else.

One table serves the reader (missing, surplus, misshapen tensors), the weights and the writer. Names are
those that transformers stores: experts one by one, n-gram tables in parts.
"""

from __future__ import annotations

from collections.abc import Iterator

from stallwatch_engine.checkpoint.config import LayerKind, ModelConfig

Shape = tuple[int, ...]
Named = Iterator[tuple[str, Shape]]

EMBED = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
MIXER = "model.hyper_connection_mixer"
BUFFERS = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")  # int64


def layer_prefix(layer: int) -> str:
    """What the names of a decoder layer's tensors begin with."""
    return f"model.layers.{layer}"


def table_prefix(layer: int) -> str:
    """What the names of a PLE layer's table and buffers begin with."""
    return f"{layer_prefix(layer)}.ple.ple_embedding"


def part_name(layer: int, part: int) -> str:
    """One part of a PLE layer's table."""
    return f"{table_prefix(layer)}.ngram_embedding.shard_{part}.weight"


def is_buffer(name: str) -> bool:
    """Whether the tensor holds hash numbers, not weights."""
    return name.rpartition(".")[2] in BUFFERS


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Name to shape, in the model's order."""
    return dict(_model(config))


def _model(config: ModelConfig) -> Named:
    yield EMBED, (config.vocab, config.hidden)
    for layer, kind in enumerate(config.layers):
        prefix = layer_prefix(layer)
        yield from _hyper(config, f"{prefix}.attn_hyper_connection", inject=True)
        if kind is LayerKind.GDN:
            yield from _gdn(config, f"{prefix}.linear_attn")
        else:
            yield from _qsa(config, f"{prefix}.self_attn")
        yield from _hyper(config, f"{prefix}.mlp_hyper_connection", inject=True)
        yield from _moe(config, f"{prefix}.mlp")
        if config.ple is not None and layer in config.ple.layers:
            yield from _ple(config, layer)
    yield from _hyper(config, MIXER, inject=False)
    if not config.tied:
        yield HEAD, (config.vocab, config.hidden)


def _hyper(config: ModelConfig, prefix: str, *, inject: bool) -> Named:
    wide, rank = config.residual, config.hyper.rank
    yield f"{prefix}.hc_norm.weight", (wide,)
    yield f"{prefix}.input_mix_weight_down.weight", (rank, wide)
    yield f"{prefix}.input_mix_weight_up.weight", (wide, rank)
    if inject:
        yield f"{prefix}.block_inject_weight.weight", (config.hyper.streams, wide)


def _gdn(config: ModelConfig, prefix: str) -> Named:
    gdn, hidden = config.gdn, config.hidden
    yield f"{prefix}.A_log", (gdn.value_heads,)
    yield f"{prefix}.dt_bias", (gdn.value_heads,)
    yield f"{prefix}.conv1d.weight", (gdn.channels, 1, gdn.conv_kernel)
    yield f"{prefix}.in_proj_a.weight", (gdn.value_heads, hidden)
    yield f"{prefix}.in_proj_b.weight", (gdn.value_heads, hidden)
    yield f"{prefix}.in_proj_qkv.weight", (gdn.channels, hidden)
    yield f"{prefix}.in_proj_z.weight", (gdn.values, hidden)
    yield f"{prefix}.norm.weight", (gdn.value_dim,)
    yield f"{prefix}.out_proj.weight", (hidden, gdn.values)


def _qsa(config: ModelConfig, prefix: str) -> Named:
    qsa, hidden = config.qsa, config.hidden
    queries, keys = qsa.query_heads * qsa.head_dim, qsa.kv_heads * qsa.head_dim
    yield f"{prefix}.q_proj.weight", (2 * queries, hidden)  # per head: query, then gate
    yield f"{prefix}.k_proj.weight", (keys, hidden)
    yield f"{prefix}.v_proj.weight", (keys, hidden)
    yield f"{prefix}.o_proj.weight", (hidden, queries)
    yield f"{prefix}.q_norm.weight", (qsa.head_dim,)
    yield f"{prefix}.k_norm.weight", (qsa.head_dim,)
    yield f"{prefix}.indexer.index_qk_proj.weight", ((qsa.index_heads + 1) * qsa.index_dim, hidden)
    yield f"{prefix}.indexer.q_layernorm.weight", (qsa.index_dim,)
    yield f"{prefix}.indexer.k_layernorm.weight", (qsa.index_dim,)


def _moe(config: ModelConfig, prefix: str) -> Named:
    moe, hidden = config.moe, config.hidden
    yield f"{prefix}.gate.weight", (moe.experts, hidden)
    for expert in range(moe.experts):
        yield from _mlp(f"{prefix}.experts.{expert}", hidden, moe.width)
    yield from _mlp(f"{prefix}.shared_expert", hidden, moe.shared_width)
    yield f"{prefix}.shared_expert_gate.weight", (1, hidden)


def _mlp(prefix: str, hidden: int, width: int) -> Named:
    yield f"{prefix}.gate_proj.weight", (width, hidden)
    yield f"{prefix}.up_proj.weight", (width, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, width)


def _ple(config: ModelConfig, layer: int) -> Named:
    assert config.ple is not None
    ple, wide = config.ple, config.residual
    prefix = f"{layer_prefix(layer)}.ple"
    yield f"{prefix}.conv1d.weight", (wide, 1, ple.conv_kernel)
    yield f"{prefix}.key_proj.weight", (wide, ple.embed_dim)
    yield f"{prefix}.value_proj.weight", (config.hidden, ple.embed_dim)
    for norm in ("norm_conv", "norm_key", "norm_query"):
        yield f"{prefix}.{norm}.weight", (wide,)
    numbers = ple.numbers
    sizes = (numbers.ngram_size, numbers.heads, numbers.heads)
    for buffer, size in zip(BUFFERS, sizes, strict=True):
        yield f"{table_prefix(layer)}.{buffer}", (size,)
    for part, rows in enumerate(ple.layout(layer).shard_rows()):
        if rows:
            yield part_name(layer, part), (rows, numbers.head_dim)
