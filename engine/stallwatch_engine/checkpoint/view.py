"""A checkpoint folder as named, lazily read tensors.

Opening checks the folder's listing and the stored hash numbers of its tables: a missing, surplus or misshapen
tensor is found before any weight is read.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from stallwatch_engine.checkpoint.errors import BadCheckpoint
from stallwatch_engine.checkpoint.expected import BUFFERS, part_name, table_prefix
from stallwatch_engine.checkpoint.header import TensorInfo
from stallwatch_engine.checkpoint.listing import Listing
from stallwatch_kernels.errors import BadMetadata
from stallwatch_kernels.ple.layout import NgramLayout, verify


@dataclass(frozen=True, slots=True)
class TablePart:
    """Rows `first` to `first + rows` of a PLE table: one stored tensor, to be read or mapped by place."""

    info: TensorInfo
    first: int
    rows: int


@dataclass(frozen=True, slots=True)
class PleTable:
    """One PLE layer's table on disk: its verified layout and its parts in row order."""

    layer: int
    layout: NgramLayout
    parts: tuple[TablePart, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.info.nbytes for part in self.parts)


class CheckpointView:
    """One open checkpoint. Close it, or use it as a context manager; tensors already read stay valid."""

    def __init__(self, listing: Listing) -> None:
        self.folder = listing.folder
        self.config = listing.config
        self.tensors = listing.tensors
        self._listing = listing
        self._stack = contextlib.ExitStack()
        self._files: dict[Path, Any] = {}

    @classmethod
    def open(cls, folder: Path) -> CheckpointView:
        """Check the folder against its own configuration. Raises BadCheckpoint or UnsupportedModel."""
        view = cls(Listing.read(folder))
        config = view.config
        try:
            for layer in config.ple.layers if config.ple is not None else ():
                view._check_hash(layer)
        except BaseException:
            view.close()
            raise
        return view

    def info(self, name: str) -> TensorInfo:
        """Where the tensor lies. Raises BadCheckpoint if there is none of that name."""
        return self._listing.info(name)

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, in the type it is stored in."""
        return self._read(self.info(name), None)

    def read_rows(self, name: str, lo: int, hi: int) -> torch.Tensor:
        """Rows `lo` to `hi` of it; nothing else is touched."""
        return self._read(self.info(name), (lo, hi))

    def table(self, layer: int) -> PleTable:
        """The PLE table of a decoder layer; KeyError if it has none."""
        if self.config.ple is None:
            raise KeyError(layer)
        layout = self.config.ple.layout(layer)
        parts: list[TablePart] = []
        first = 0
        for part, rows in enumerate(layout.shard_rows()):
            if rows:
                parts.append(TablePart(self.info(part_name(layer, part)), first, rows))
            first += rows
        return PleTable(layer, layout, tuple(parts))

    def close(self) -> None:
        """Unmap the files."""
        self._files.clear()
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self, info: TensorInfo, rows: tuple[int, int] | None) -> torch.Tensor:
        if rows is not None and not (info.shape and 0 <= rows[0] <= rows[1] <= info.shape[0]):
            raise IndexError(f"rows {rows[0]}:{rows[1]} of {info.name} with shape {info.shape}")
        try:
            if info.path not in self._files:
                handle = safe_open(info.path, framework="pt", device="cpu")
                self._files[info.path] = self._stack.enter_context(handle)
            file = self._files[info.path]
            found: torch.Tensor = (
                file.get_tensor(info.name)
                if rows is None
                else file.get_slice(info.name)[rows[0] : rows[1]]
            )
        except (OSError, SafetensorError) as exc:
            raise BadCheckpoint(
                f"cannot be read ({exc})", file=str(info.path), tensor=info.name
            ) from exc
        return found

    def _check_hash(self, layer: int) -> None:
        """The stored hash numbers must be those that the kernels use, else rows are plausible and wrong."""
        assert self.config.ple is not None
        names = [f"{table_prefix(layer)}.{buffer}" for buffer in BUFFERS]
        stored = [self.read(name).tolist() for name in names]
        try:
            verify(self.config.ple.layout(layer), stored[0], stored[1], stored[2])
        except BadMetadata as exc:
            name = f"{table_prefix(layer)}.{exc.argument}"
            raise BadCheckpoint(
                f"contradicts the configuration: {exc.problem}",
                file=str(self.info(name).path),
                tensor=name,
            ) from exc
