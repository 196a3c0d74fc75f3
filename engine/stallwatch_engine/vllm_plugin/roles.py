"""Which part of vLLM this process is, read from the name that vLLM gave it."""

from __future__ import annotations

import multiprocessing
import re
import sys
from typing import NamedTuple

_CORE = re.compile(r"EngineCore(?:_DP(\d+))?$")
_WORKER = re.compile(r"VllmWorker-(\d+)$")
_API = re.compile(r"ApiServer_(\d+)$")
DP_STRIDE = 1000  # worker rank 1003: rank 3 of data-parallel engine 1


class Role(NamedTuple):
    """A board role and a rank that is unique in it."""

    role: str
    rank: int


def of_process() -> Role | None:
    """The role of this process, or None: it may still become the API server (`vllm --help` does not).

    Read at the first mark, not earlier: at the moment of a fork the name is still the parent's.
    """
    name = multiprocessing.current_process().name
    if match := _CORE.match(name):
        return Role("core", int(match[1] or 0))
    if match := _WORKER.match(name):
        return Role("worker", _dp_rank() * DP_STRIDE + int(match[1]))
    if match := _API.match(name):
        return Role("api", int(match[1]))
    return None


def _dp_rank() -> int:
    """The data-parallel rank of the EngineCore that started this worker."""
    parent = multiprocessing.parent_process()
    match = _CORE.match(parent.name) if parent is not None else None
    return int(match[1] or 0) if match else 0


def is_inspector() -> bool:
    """The model-inspect helper of vLLM loads plugins too; it serves nothing."""
    return bool(sys.argv) and sys.argv[0].endswith("registry.py")
