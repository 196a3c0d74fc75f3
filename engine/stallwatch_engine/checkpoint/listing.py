"""What a checkpoint folder says it holds, against its own configuration: names, shapes, types, lengths.

Only `config.json`, the index and the files' headers are read, and nothing heavy is imported: a folder that
cannot be served is refused before a process is started for it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stallwatch_engine.checkpoint.config import ModelConfig
from stallwatch_engine.checkpoint.errors import BadCheckpoint
from stallwatch_engine.checkpoint.expected import HEAD, Shape, expected_tensors, is_buffer
from stallwatch_engine.checkpoint.header import TensorInfo, read_header
from stallwatch_engine.checkpoint.parse import read_config

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Listing:
    """Every tensor of the folder by name, all of them those that `config` asks for."""

    folder: Path
    config: ModelConfig
    tensors: dict[str, TensorInfo]

    @classmethod
    def read(cls, folder: Path) -> Listing:
        """Raises BadCheckpoint or UnsupportedModel."""
        config = read_config(folder / "config.json")
        found = cls(folder, config, _find(folder))
        found._check()
        return found

    def info(self, name: str) -> TensorInfo:
        """Where the tensor lies. Raises BadCheckpoint if there is none of that name."""
        found = self.tensors.get(name)
        if found is None:
            index = self.folder / INDEX
            file = index if index.exists() else self.folder / SINGLE
            raise BadCheckpoint("is missing", file=str(file), tensor=name)
        return found

    def _check(self) -> None:
        expected = expected_tensors(self.config)
        for name, shape in expected.items():
            _check(self.info(name), shape)
        surplus = set(self.tensors) - set(expected)
        if self.config.tied:
            surplus.discard(HEAD)  # some writers store the shared tensor twice
        for name in sorted(surplus):
            info = self.tensors[name]
            if info.nbytes:  # parts behind the end of a table may be stored empty
                raise BadCheckpoint(
                    "is not part of the configured model: it would be ignored",
                    file=str(info.path),
                    tensor=name,
                )


def _check(info: TensorInfo, shape: Shape) -> None:
    file = str(info.path)
    if info.shape != shape:
        raise BadCheckpoint(
            f"has shape {list(info.shape)}; the configuration asks for {list(shape)}",
            file=file,
            tensor=info.name,
        )
    if is_buffer(info.name) != (info.dtype == "I64"):
        wanted = "I64" if is_buffer(info.name) else "a floating-point type"
        raise BadCheckpoint(f"is {info.dtype}; expected {wanted}", file=file, tensor=info.name)


def _find(folder: Path) -> dict[str, TensorInfo]:
    index = folder / INDEX
    if not index.exists():
        return read_header(folder / SINGLE)
    try:
        places = json.loads(index.read_bytes())["weight_map"]
        pairs = {str(name): str(file) for name, file in places.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise BadCheckpoint("is no index of safetensors files", file=str(index)) from exc
    headers: dict[str, dict[str, TensorInfo]] = {}
    for file in sorted(set(pairs.values())):
        if Path(file).name != file:
            raise BadCheckpoint(f"names a file outside of the folder: {file!r}", file=str(index))
        headers[file] = read_header(folder / file)
    for name, file in pairs.items():
        if name not in headers[file]:
            raise BadCheckpoint("is missing", file=str(folder / file), tensor=name)
    return {name: headers[file][name] for name, file in pairs.items()}
