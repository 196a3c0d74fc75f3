"""How a worker is to serve, as the command line said it; passed to the process as one JSON object."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from stallwatch_engine.checkpoint.config import ModelConfig
from stallwatch_engine.execute.settings import ExecuteSettings, Runner
from stallwatch_engine.ple.open import PleSettings, Where
from stallwatch_engine.schedule.limits import Limits
from stallwatch_engine.state.stores import StoreSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
KV_DTYPES = {**DTYPES, "fp8_e4m3": torch.float8_e4m3fn}
AUTO = "auto"


class BadOptions(ValueError):
    """Options that contradict each other or the model: the operator must change them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """`auto` is what the checkpoint says. `kv_tokens` None: room for the longest request, and for all of
    them up to 65,536 tokens. `shapes` None: every decode shape is prepared. `max_chunk` None: a quarter of a
    step, so that a request can start beside a long prompt instead of after it.
    """

    model: str
    dtype: str = AUTO
    kv_dtype: str = AUTO
    device: str = "cpu"
    threads: int = 1
    max_num_seqs: int = 8
    max_model_len: int | None = None
    max_batched_tokens: int = 512
    chunked_prefill: bool = True
    max_chunk: int | None = None
    page_size: int = 16
    kv_tokens: int | None = None
    runner: str = Runner.MRV2
    max_concurrent_batches: int = 2
    shapes: tuple[int, ...] | None = None
    ple_backend: str = Where.RESIDENT
    ple_folder: str | None = None
    ple_replace: bool = False
    ple_cpus: str = ""
    step_timeout: float = 60.0

    def pack(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> WorkerOptions:
        """From pack()'s text. BadOptions for anything else."""
        try:
            values: dict[str, Any] = json.loads(text)
            if values.get("shapes") is not None:
                values["shapes"] = tuple(values["shapes"])
            return cls(**values)
        except (ValueError, TypeError, AttributeError) as error:
            raise BadOptions(f"worker options: {error}") from error

    def dtype_of(self, config: ModelConfig) -> torch.dtype:
        """The model's type."""
        return _named(DTYPES, config.dtype if self.dtype == AUTO else self.dtype, "dtype")

    def limits(self, config: ModelConfig) -> Limits:
        """What the scheduler may use. BadOptions when it cannot work."""
        length = min(self.max_model_len or config.max_position, config.max_position)
        wanted = self.kv_tokens or max(length, min(self.max_num_seqs * length, 65536))
        budget = max(self.max_batched_tokens, self.max_num_seqs)
        if not self.chunked_prefill:
            budget = max(budget, length)
        try:
            return Limits(
                max_seqs=self.max_num_seqs,
                token_budget=budget,
                max_model_len=length,
                page_size=self.page_size,
                pages=-(-wanted // self.page_size),
                max_in_flight=1 if self.runner == Runner.MRV1 else self.max_concurrent_batches,
                chunked=self.chunked_prefill,
                max_chunk=max(1, budget // 4) if self.max_chunk is None else self.max_chunk,
            )
        except ValueError as error:
            raise BadOptions(str(error)) from error

    def stores(self, config: ModelConfig, limits: Limits) -> StoreSpec:
        """Sizes and types of the state. BadOptions when this model's cannot be such."""
        dtype = self.dtype_of(config)
        kv = dtype if self.kv_dtype == AUTO else _named(KV_DTYPES, self.kv_dtype, "kv_dtype")
        spec = StoreSpec(
            slots=limits.slots,
            pages=limits.pages,
            page_size=limits.page_size,
            max_pages=limits.max_pages,
            dtype=dtype,
            kv_dtype=kv,
            device=self.device,
        )
        try:
            spec.check(config)
        except ValueError as error:
            raise BadOptions(str(error)) from error
        return spec

    def execute(self) -> ExecuteSettings:
        """How steps run."""
        try:
            return ExecuteSettings(
                runner=Runner(self.runner), shapes=self.shapes, timeout_s=self.step_timeout
            )
        except ValueError as error:
            raise BadOptions(str(error)) from error

    def check_device(self) -> None:
        """BadOptions when torch cannot use it."""
        try:
            torch.empty(1, device=self.device)
        except Exception as error:  # of many types, torch's own choice
            reason = str(error).split("\n", 1)[0]
            raise BadOptions(f"device={self.device}: {reason}") from error

    def ple(self) -> PleSettings:
        """Where the n-gram tables are."""
        try:
            return PleSettings(
                where=Where(self.ple_backend),
                folder=Path(self.ple_folder) if self.ple_folder else None,
                replace=self.ple_replace,
                cpus=self.ple_cpus,
            )
        except ValueError as error:
            raise BadOptions(str(error)) from error


def _named(known: dict[str, torch.dtype], name: str, what: str) -> torch.dtype:
    if name not in known:
        raise BadOptions(f"{what}={name}; known: {', '.join(known)}")
    return known[name]
