"""How large a step may be, and what its rows look like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class PleShape:
    """Rows of one step are `[L, T, E]` in `dtype`: L PLE layers, T <= max_tokens, E = embed.

    A step holds at most `max_requests` requests; each brings ngram-1 older ids. `max_in_flight` steps
    may be between submit() and consumed().
    """

    layers: tuple[str, ...]
    embed: int
    ngram: int
    dtype: str
    max_tokens: int
    max_requests: int
    max_in_flight: int = 2

    def __post_init__(self) -> None:
        for name in ("embed", "max_tokens", "max_requests", "max_in_flight"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value < 1 << 31:
                raise ValueError(f"PLE shape: {name}={value!r}; expected a positive integer")
        if type(self.ngram) is not int or not 2 <= self.ngram <= 16:
            raise ValueError(f"PLE shape: ngram={self.ngram!r}; expected 2 to 16")
        if self.dtype not in DTYPES:
            raise ValueError(
                f"PLE shape: dtype={self.dtype!r}; expected one of {', '.join(DTYPES)}"
            )
        if not self.layers or len(set(self.layers)) != len(self.layers):
            raise ValueError(f"PLE shape: layers={self.layers!r}; expected distinct names")

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def describe(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "layers": list(self.layers),
            "embed": self.embed,
            "ngram": self.ngram,
            "dtype": self.dtype,
            "max_tokens": self.max_tokens,
            "max_requests": self.max_requests,
            "max_in_flight": self.max_in_flight,
        }

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> PleShape:
        """From describe()'s values. ValueError for anything else."""
        expected = set(cls.__dataclass_fields__)
        if set(values) != expected:
            raise ValueError(f"PLE shape: has {sorted(values)}; expected {sorted(expected)}")
        layers = values["layers"]
        if not isinstance(layers, list) or not all(isinstance(name, str) for name in layers):
            raise ValueError(f"PLE shape: layers={layers!r}; expected a list of names")
        return cls(**{**values, "layers": tuple(layers)})


def check_step(
    shape: PleShape, ids: torch.Tensor, query_start_loc: torch.Tensor, context: torch.Tensor
) -> tuple[int, int]:
    """(T, R) of a step; ValueError when its tensors contradict each other or the shape."""
    for name, tensor, dimensions in (
        ("ids", ids, 1),
        ("query_start_loc", query_start_loc, 1),
        ("context", context, 2),
    ):
        if tensor.dtype != torch.int32 or tensor.ndim != dimensions:
            found = f"{tensor.dtype}{tuple(tensor.shape)}"
            raise ValueError(
                f"PLE step: {name} is {found}; expected int32, {dimensions} dimensions"
            )
    tokens, requests = ids.shape[0], query_start_loc.shape[0] - 1
    if not 1 <= tokens <= shape.max_tokens:
        raise ValueError(f"PLE step: {tokens} tokens; expected 1 to {shape.max_tokens}")
    if not 1 <= requests <= shape.max_requests:
        raise ValueError(f"PLE step: {requests} requests; expected 1 to {shape.max_requests}")
    if tuple(context.shape) != (requests, shape.ngram - 1):
        expected = (requests, shape.ngram - 1)
        raise ValueError(f"PLE step: context is {tuple(context.shape)}; expected {expected}")
    return tokens, requests
