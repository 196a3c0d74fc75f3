"""transformers' Qwen4-Exp on a tiny random checkpoint: the judge that nobody here wrote.

Every mechanism is on and has weights that matter: two PLE layers (so that prime layout and multipliers
differ), the PLE convolution (zero as initialised by transformers) randomised, a selection budget small
enough that blocks are dropped past 35 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from transformers.models.qwen4_exp import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

torch.set_num_threads(1)

VOCAB = 272
EOS = 257
PAD = 256


def tiny_config(**changes: Any) -> Qwen4ExpTextConfig:
    """4 layers (GDN, QSA, GDN, QSA), hidden 64, 8 experts, PLE on layers 1 and 3 (one-indexed)."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
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
    return Qwen4ExpTextConfig(**{**settings, **changes})


@lru_cache(maxsize=4)
def tiny_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> Qwen4ExpForCausalLM:
    """The model with random, fan-in scaled weights; shared between tests, so never change it."""
    torch.manual_seed(seed)
    config = tiny_config()
    config._attn_implementation = "sdpa"  # eager gives NaN for fully masked rows
    model = Qwen4ExpForCausalLM(config)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name.rsplit(".", 2)[-2] and parameter.ndim == 1:
                parameter.add_(noise * 0.1)  # off the identity
            elif name.endswith("ple.conv1d.weight"):
                parameter.copy_(noise * 0.3)
            elif "ngram_embedding" in name:
                parameter.copy_(noise)
            elif parameter.ndim >= 2:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    return model.to(dtype).eval()


@dataclass
class Call:
    """One call of a module: what went in and what came out."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    output: Any = None


@contextmanager
def recorded(module: torch.nn.Module) -> Iterator[list[Call]]:
    """Every call of `module` inside the block, in order."""
    calls: list[Call] = []
    before = module.register_forward_pre_hook(
        lambda _m, args, kwargs: calls.append(Call(args, kwargs)), with_kwargs=True
    )
    after = module.register_forward_hook(
        lambda _m, _a, _k, output: setattr(calls[-1], "output", output), with_kwargs=True
    )
    try:
        yield calls
    finally:
        before.remove()
        after.remove()


@contextmanager
def stable_ties() -> Iterator[None]:
    """The indexer's 1-D `topk` as a stable descending sort: relu makes exact ties common, and
    torch.topk promises no order among them. The order of a 2-D router `topk` is left alone."""
    original = torch.Tensor.topk

    def stable(self: torch.Tensor, k: int, *args: Any, **kwargs: Any) -> Any:
        if self.ndim != 1:
            return original(self, k, *args, **kwargs)
        ordered = torch.sort(self, descending=True, stable=True)
        return torch.return_types.topk((ordered.values[:k], ordered.indices[:k]))

    torch.Tensor.topk = stable  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.topk = original  # type: ignore[method-assign]
