"""A byte-level tokenizer without merges: one token a byte, so any prompt is legal and lengths are exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIALS: Final = ("<|pad|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
PAD: Final = 256
EOS: Final = 257
VOCAB: Final = 272  # 256 bytes, the specials, and fillers up to a multiple of 16

CHAT_TEMPLATE: Final = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_SETTINGS: Final = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "pad_token": "<|pad|>",
    "eos_token": "<|eos|>",
    "padding_side": "left",
    "clean_up_tokenization_spaces": False,
}


def byte_tokenizer() -> Tokenizer:
    """The tokenizer: the 256 bytes (in ByteLevel order), then PAD, EOS and the other specials."""
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for special in SPECIALS:
        vocab[special] = len(vocab)
    while len(vocab) < VOCAB:
        vocab[f"<|x{len(vocab)}|>"] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True) for s in SPECIALS])
    return tokenizer


def write_tokenizer(folder: Path, *, max_length: int) -> None:
    """tokenizer.json, tokenizer_config.json and the chat template."""
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {**_SETTINGS, "model_max_length": max_length}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings, indent=2, sort_keys=True) + "\n"
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
