"""Triton kernels for CUDA and ROCm: optional, and never imported unless `refusal()` is None.

The modules beside this one import triton, which decides at import whether kernels are compiled or interpreted
(TRITON_INTERPRET=1: on CPU tensors, for correctness only).
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch


def interpreted() -> bool:
    """Whether this process runs Triton kernels in its interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def refusal() -> str | None:
    """Why the Triton kernels cannot run here, in words for `admission.choose`; None: they can."""
    if find_spec("triton") is None:
        return "triton is not installed (extra `triton`)"
    if interpreted():
        return None
    if not torch.cuda.is_available():
        return "no CUDA or ROCm device (TRITON_INTERPRET=1 interprets the kernels on the CPU)"
    return None
