"""The one interface of the PLE backends, and of the tables behind them."""

from __future__ import annotations

from typing import Protocol

import torch

from stallwatch_engine.ple.shape import PleShape


class PleBackend(Protocol):
    """Rows of numbered steps. submit, wait and consumed may come from different threads.

    Steps are numbered without gaps. wait(seq) may begin before submit(seq): a stream that runs ahead
    does that. The rows belong to the caller from wait() to consumed(), and to nobody afterwards.
    """

    @property
    def shape(self) -> PleShape: ...

    def submit(
        self, seq: int, ids: torch.Tensor, query_start_loc: torch.Tensor, context: torch.Tensor
    ) -> None:
        """Ask for rows: ids int32[T], query_start_loc int32[R+1], context int32[R, n-1].

        The tensors are read before it returns. Never blocks for room: OverContract instead.
        """

    def wait(self, seq: int, deadline: float) -> torch.Tensor:
        """[L, T, E] in model dtype. TimeoutError at the deadline, PleFailed when they never come."""

    def consumed(self, seq: int) -> None:
        """The rows were read; their buffer may be used again."""

    def buffer(self, slot: int) -> torch.Tensor:
        """The static [L, max_tokens, E] that wait() cuts step `seq % max_in_flight` from: for captured graphs."""

    def fail(self, error: BaseException) -> None:
        """No more requests will come: every wait ends with PleFailed."""

    def close(self) -> None:
        """End everything that belongs to the backend."""


class RowSource(Protocol):
    """Tables that turn a packed step into rows: [L, T, E], hashed, gathered, cast once."""

    @property
    def layers(self) -> tuple[str, ...]: ...

    @property
    def embed(self) -> int: ...

    @property
    def dtype(self) -> str: ...

    @property
    def ngram(self) -> int: ...

    def gather(
        self,
        ids: torch.Tensor,
        query_start_loc: torch.Tensor,
        context: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Fill out [L, T, E] completely. Negative ids count as 0. Raises, and never fills in part quietly."""
