"""The completion record: written last, so that a folder without it holds nothing that counts."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

FILE = "complete.json"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Record:
    """Whose tables these are, and how long each layer's file is, in bytes."""

    fingerprint: str
    sizes: tuple[int, ...]


def layer_file(folder: Path, ordinal: int) -> Path:
    """The file of the `ordinal`-th layer of the spec."""
    return folder / f"layer-{ordinal}.rows"


def read(folder: Path) -> Record | None:
    """The record, or None: missing, cut short, of another version, or contradicted by the files."""
    try:
        values = json.loads((folder / FILE).read_bytes())
        record = Record(str(values["fingerprint"]), tuple(int(size) for size in values["sizes"]))
        whole = all(
            os.stat(layer_file(folder, n)).st_size == size for n, size in enumerate(record.sizes)
        )
        return record if values["version"] == VERSION and whole else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(folder: Path, record: Record) -> None:
    """Durably, and at once or not at all."""
    values = {"version": VERSION, "fingerprint": record.fingerprint, "sizes": list(record.sizes)}
    partial = folder / f"{FILE}.partial"
    with partial.open("wb") as file:
        file.write(json.dumps(values).encode())
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, folder / FILE)
    sync(folder)


def remove(folder: Path) -> None:
    """Durably: from now on the files are not believed."""
    (folder / FILE).unlink(missing_ok=True)
    sync(folder)


def sync(folder: Path) -> None:
    """Make renames in the folder last."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
