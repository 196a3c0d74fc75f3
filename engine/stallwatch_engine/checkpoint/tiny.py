"""The tiny model: every mechanism of the architecture, in a few megabytes, for tests and the demonstration.

Two PLE layers, so that prime layouts and multipliers differ; a selection budget of 8 blocks, so that blocks
are dropped past 35 tokens; n-gram tables in parts, as in a released checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stallwatch_engine.checkpoint.tokenizer import EOS, PAD, VOCAB
from stallwatch_engine.checkpoint.write import Recipe, Written, write_checkpoint


def tiny_settings(*, dtype: str = "float32") -> dict[str, Any]:
    """Its `config.json`."""
    return {
        "architectures": ["Qwen4ExpForCausalLM"],
        "model_type": "qwen4_exp_text",
        "dtype": dtype,
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
        "hidden_act": "silu",
        "attention_bias": False,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 32,
        "indexer_compress_ratio": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "norm_topk_prob": True,
        "hc_count": 4,
        "hc_lowrank": 16,
        "ple_layer_ids": [1, 3],
        "ple_embed_dim": 64,
        "ple_conv_kernel_size": 4,
        "ngram_size": 3,
        "heads_per_ngram": 4,
        "ngram_vocab_size_base": 1000,
        "make_ngram_vocab_size_divisible_by": 128,
        "seed": 1234,
        "split_ngram_parts": 8,
        "max_position_embeddings": 16384,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "bos_token_id": None,
    }


def make_tiny(folder: Path, *, seed: int = 0, dtype: str = "float32") -> Written:
    """Write it, or find it already written. Raises FolderInUse."""
    return write_checkpoint(folder, Recipe(tiny_settings(dtype=dtype), seed))
