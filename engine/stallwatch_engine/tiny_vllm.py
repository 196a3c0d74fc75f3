"""A tiny random checkpoint that vLLM can serve on a CPU: for the demo and the tests.

Two Llama layers, a byte-level tokenizer without merges and a chat template: about 2 MB, written in
under a second, without network. The same seed gives the same bytes. Needs numpy, safetensors and
tokenizers, all of which vLLM brings.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

HIDDEN = 128
HEADS = 4  # head size 32: the smallest that vLLM's CPU attention takes
KV_HEADS = 2
FFN = 256
LAYERS = 2
MAX_LEN = 4096
SPECIAL = ("<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|system|>", "<|pad|>")
BYTES = 256
VOCAB = BYTES + 64  # specials, then room so that the size is a multiple of 64
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' }}"
    "{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def write(folder: Path, *, seed: int = 0) -> Path:
    """Write the checkpoint into `folder` (made if needed) and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, printable = _tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    _json(folder / "config.json", _config())
    _json(folder / "tokenizer_config.json", _tokenizer_config())
    _json(
        folder / "generation_config.json",
        {"bos_token_id": BYTES, "eos_token_id": BYTES + 1, "pad_token_id": BYTES + 5},
    )
    _weights(folder / "model.safetensors", printable, seed=seed)
    return folder


def _json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _config() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "max_position_embeddings": MAX_LEN,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": BYTES,
        "eos_token_id": BYTES + 1,
        "pad_token_id": BYTES + 5,
    }


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
        "pad_token": SPECIAL[5],
        "model_max_length": MAX_LEN,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _tokenizer() -> tuple[Any, list[int]]:
    """The tokenizer, and the ids of the printable ASCII characters."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    printable = [vocab[chr(code)] for code in range(0x21, 0x7F)]
    return tokenizer, printable


def _weights(path: Path, printable: list[int], *, seed: int) -> None:
    from safetensors.numpy import save_file

    np: Any = importlib.import_module("numpy")  # comes with the engine, not with the supervisor

    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Any:
        return rng.standard_normal((rows, columns), dtype=np.float32) / np.float32(columns**0.5)

    head = np.zeros((VOCAB, HIDDEN), dtype=np.float32)
    # Only printable characters get a row: greedy text is always valid UTF-8 and never ends by
    # itself, so a test decides how long a request runs.
    head[printable] = matrix(len(printable), HIDDEN) * 8
    tensors = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN) * np.float32(HIDDEN**0.5),
        "model.norm.weight": np.ones(HIDDEN, dtype=np.float32),
        "lm_head.weight": head,
    }
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (FFN, HIDDEN),
        "mlp.up_proj": (FFN, HIDDEN),
        "mlp.down_proj": (HIDDEN, FFN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name, (rows, columns) in shapes.items():
            tensors[f"{prefix}.{name}.weight"] = matrix(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = np.ones(HIDDEN, dtype=np.float32)
    save_file(tensors, str(path), metadata={"format": "pt"})


def main(argv: list[str] | None = None) -> int:
    """`python -m stallwatch_engine.tiny_vllm DIR`: write the checkpoint, print its folder."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.stderr.write("usage: python -m stallwatch_engine.tiny_vllm DIR\n")
        return 64
    sys.stdout.write(f"{write(Path(arguments[0]))}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
