"""The bench model: large enough that a step's time is memory traffic and arithmetic, small enough for a laptop.

Its settings are fixed by `BENCH_SHA256`; figures of another model are not comparable.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from stallwatch_engine.checkpoint.tiny import tiny_settings
from stallwatch_engine.checkpoint.write import Recipe, Written, write_checkpoint

BENCH_SHA256: Final = "07337f66eb92b450f53f7f91bcd5bce8accbd70a36eb6af96afd681ea90bd929"


def bench_settings() -> dict[str, Any]:
    """Its `config.json`: 8 layers, every fourth sparse attention, one PLE layer, float32."""
    linear, indexed = "linear_attention", "indexed_attention"
    return {
        **tiny_settings(),
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "layer_types": [linear, linear, linear, indexed] * 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "indexer_head_dim": 32,
        "indexer_budget": 512,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "rope_parameters": {
            **tiny_settings()["rope_parameters"],
            "partial_rotary_factor": 0.25,
        },
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
        "hc_lowrank": 64,
        "ple_layer_ids": [2],
        "ple_embed_dim": 512,
        "ngram_vocab_size_base": 20_000,
    }


def config_sha256(settings: Mapping[str, Any]) -> str:
    """What identifies a model's settings: SHA-256 of the sorted JSON."""
    return hashlib.sha256(json.dumps(dict(settings), sort_keys=True).encode()).hexdigest()


def make_bench(
    folder: Path, *, seed: int = 0, progress: Callable[[str], None] = lambda _: None
) -> Written:
    """Write it, or find it already written. Raises FolderInUse."""
    return write_checkpoint(folder, Recipe(bench_settings(), seed), progress=progress)
