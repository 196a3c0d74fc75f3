"""How much a scheduler may use, checked once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Budgets of one engine.

    `max_in_flight` is the concurrent-batch contract: steps handed out and not yet retired. Without
    `chunked` a prompt is computed in one step, so the token budget must hold the longest one. With it a
    request gets at most `max_chunk` tokens in a step (None: the whole budget): less lets requests start
    beside a long prompt, at the price of more steps for it.
    """

    max_seqs: int
    token_budget: int
    max_model_len: int
    page_size: int
    pages: int
    max_in_flight: int = 2
    chunked: bool = True
    max_chunk: int | None = None
    max_waiting: int = 1024

    def __post_init__(self) -> None:
        for name in (
            "max_seqs",
            "max_model_len",
            "page_size",
            "pages",
            "max_in_flight",
            "max_waiting",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.token_budget < self.max_seqs:
            raise ValueError(
                f"token_budget {self.token_budget} is less than max_seqs {self.max_seqs}: "
                "some request would never get its token"
            )
        if self.max_chunk is not None and self.max_chunk < 1:
            raise ValueError(f"max_chunk must be at least 1, got {self.max_chunk}")
        if not self.chunked and self.token_budget < self.capacity:
            raise ValueError(
                f"without chunked prefill token_budget {self.token_budget} must hold "
                f"the longest request, {self.capacity} tokens"
            )

    @property
    def chunk(self) -> int:
        """Tokens that one request gets in a step at most."""
        return self.token_budget if self.max_chunk is None else self.max_chunk

    @property
    def capacity(self) -> int:
        """Tokens that prompt and answer of one request may have together."""
        return min(self.max_model_len, self.pages * self.page_size)

    @property
    def slots(self) -> int:
        """Per-request states: spare ones let a request start while its predecessor's is in quarantine."""
        return self.max_seqs + self.max_in_flight - 1

    @property
    def max_pages(self) -> int:
        """Width of a page table."""
        return self.pages_for(self.capacity)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)
