"""Write a checkpoint with random weights: same settings and seed, same bytes.

Each tensor is drawn by a counter-based generator keyed by its name, so that neither order nor threads
matter. Weights are scaled by fan-in: initialised as for training, the layers of a small model are nearly
the identity, and an engine that skips one would not be noticed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import save_file

from stallwatch_engine.checkpoint.config import ModelConfig
from stallwatch_engine.checkpoint.expected import expected_tensors, is_buffer
from stallwatch_engine.checkpoint.listing import INDEX, SINGLE
from stallwatch_engine.checkpoint.parse import parse_config
from stallwatch_engine.checkpoint.tokenizer import VOCAB, write_tokenizer

RECIPE: Final = 1  # raise it whenever other bytes come out of the same settings
_MARK: Final = "stallwatch_recipe.json"
_TORCH: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class FolderInUse(Exception):
    """The folder holds something else. The caller must name another one or empty it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            f"{folder} is not empty and holds another checkpoint: name a new folder or remove it"
        )
        self.folder = folder


@dataclass(frozen=True, slots=True)
class Recipe:
    """What determines every byte. `file_bytes` cuts the weights into files of about that size."""

    settings: Mapping[str, Any]
    seed: int = 0
    file_bytes: int = 1 << 40

    def fingerprint(self) -> str:
        """SHA-256 of all that determines the bytes."""
        whole = [RECIPE, self.seed, self.file_bytes, dict(self.settings)]
        return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Written:
    """A finished checkpoint. `existed` if the same bytes were already there."""

    folder: Path
    parameters: int
    nbytes: int
    existed: bool


def write_checkpoint(
    folder: Path, recipe: Recipe, *, progress: Callable[[str], None] = lambda _: None
) -> Written:
    """Write config, weights and tokenizer; `progress` gets each tensor's name. Raises FolderInUse.

    The folder appears complete or not at all: it is written beside its place and renamed.
    """
    config = parse_config(recipe.settings)
    if config.vocab != VOCAB:
        raise ValueError(f"the byte tokenizer has {VOCAB} tokens, vocab_size is {config.vocab}")
    if folder.exists() and any(folder.iterdir()):
        if _fingerprint(folder) != recipe.fingerprint():
            raise FolderInUse(folder)
        return _written(folder, config, existed=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        scratch.chmod(0o755)
        _write_weights(scratch, config, recipe, progress)
        write_tokenizer(scratch, max_length=config.max_position)
        _write_json(scratch / "config.json", dict(recipe.settings))
        _write_json(scratch / "generation_config.json", _generation(config))
        _write_json(scratch / _MARK, {"sha256": recipe.fingerprint()})
        os.replace(scratch, folder)  # onto nothing or an empty folder
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return _written(folder, config, existed=False)


def parameter_count(config: ModelConfig) -> int:
    """Weights of the model; hash numbers are none."""
    shapes = expected_tensors(config).items()
    return sum(math.prod(shape) for name, shape in shapes if not is_buffer(name))


def random_tensor(config: ModelConfig, name: str, seed: int) -> torch.Tensor:
    """The tensor of that name: hash numbers by their formula, everything else random, float32."""
    shape = expected_tensors(config)[name]
    if is_buffer(name):
        return _buffer(config, name)
    return _weight(name, shape, seed)


def _weight(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    key = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    if name.endswith(".A_log"):
        return torch.from_numpy(np.log(generator.uniform(0.01, 16.0, shape)).astype(np.float32))
    noise = torch.from_numpy(generator.standard_normal(shape, dtype=np.float32))
    if name.endswith((".linear_attn.norm.weight", ".dt_bias")):
        return 1.0 + 0.1 * noise  # plain weights: one is the identity
    if len(shape) == 1:
        return 0.1 * noise  # (1 + w) norms, moved off the identity
    if ".ngram_embedding." in name:
        return noise
    if name.endswith(".ple.conv1d.weight"):
        return (
            0.3 * noise
        )  # zero in a model that was never trained, and then its state tests nothing
    return noise / math.sqrt(shape[-1])


def _buffer(config: ModelConfig, name: str) -> torch.Tensor:
    assert config.ple is not None
    layout = config.ple.layout(int(name.split(".")[2]))
    numbers = {
        "layer_multipliers": layout.multipliers,
        "ngram_heads_vocab_sizes": layout.primes,
        "ngram_heads_offsets": layout.offsets,
    }
    return torch.tensor(numbers[name.rpartition(".")[2]], dtype=torch.int64)


def _write_weights(
    folder: Path, config: ModelConfig, recipe: Recipe, progress: Callable[[str], None]
) -> None:
    files = list(_cut(config, recipe.file_bytes))
    total = 0
    places: dict[str, str] = {}
    for number, names in enumerate(files, start=1):
        file = SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        for name, shape in names.items():
            progress(name)
            if is_buffer(name):
                tensors[name] = _buffer(config, name)
            else:
                tensors[name] = _weight(name, shape, recipe.seed).to(_TORCH[config.dtype])
            places[name] = file
            total += tensors[name].nbytes
        save_file(tensors, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)
    if len(files) > 1:
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def _cut(config: ModelConfig, file_bytes: int) -> Iterator[dict[str, tuple[int, ...]]]:
    width = _TORCH[config.dtype].itemsize
    part: dict[str, tuple[int, ...]] = {}
    size = 0
    for name, shape in expected_tensors(config).items():
        nbytes = math.prod(shape) * (8 if is_buffer(name) else width)
        if part and size + nbytes > file_bytes:
            yield part
            part, size = {}, 0
        part[name] = shape
        size += nbytes
    yield part


def _generation(config: ModelConfig) -> dict[str, Any]:
    eos = list(config.eos) if len(config.eos) > 1 else config.eos[0] if config.eos else None
    return {"do_sample": False, "eos_token_id": eos, "pad_token_id": config.pad}


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def _fingerprint(folder: Path) -> str:
    try:
        return str(json.loads((folder / _MARK).read_bytes())["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _written(folder: Path, config: ModelConfig, *, existed: bool) -> Written:
    nbytes = sum(each.stat().st_size for each in folder.glob("*.safetensors"))
    return Written(folder, parameter_count(config), nbytes, existed)
