"""Tables read by this process: rows are gathered by whoever submits."""

from __future__ import annotations

import threading
import time

import torch

from stallwatch_engine.ple.errors import PleFailed
from stallwatch_engine.ple.ledger import Ledger
from stallwatch_engine.ple.protocol import RowSource
from stallwatch_engine.ple.shape import PleShape, check_step
from stallwatch_engine.streams.bounded import check_deadline


def check_source(source: RowSource, shape: PleShape) -> None:
    """ValueError when the tables do not make rows of that shape."""
    for name in ("layers", "embed", "ngram", "dtype"):
        has, wants = getattr(source, name), getattr(shape, name)
        if has != wants:
            raise ValueError(f"PLE tables: {name} is {has}; expected {wants}")


def warm_up(source: RowSource, shape: PleShape) -> None:
    """Gather one token into nowhere, so that the first step compiles nothing."""
    out = torch.zeros(len(shape.layers), 1, shape.embed, dtype=shape.torch_dtype)
    one = torch.zeros(1, dtype=torch.int32)
    context = torch.zeros(1, shape.ngram - 1, dtype=torch.int32)
    source.gather(one, torch.tensor([0, 1], dtype=torch.int32), context, out)


class ResidentBackend:
    """A RowSource behind the common interface, with one static buffer for each step in flight."""

    def __init__(self, source: RowSource, shape: PleShape) -> None:
        check_source(source, shape)
        self._source = source
        self._shape = shape
        self._ledger = Ledger(shape.max_in_flight)
        self._changed = threading.Condition()
        self._failure: PleFailed | None = None
        size = (shape.max_in_flight, len(shape.layers), shape.max_tokens, shape.embed)
        self._rows = torch.zeros(size, dtype=shape.torch_dtype)
        warm_up(source, shape)

    @property
    def shape(self) -> PleShape:
        return self._shape

    def submit(
        self, seq: int, ids: torch.Tensor, query_start_loc: torch.Tensor, context: torch.Tensor
    ) -> None:
        tokens, _ = check_step(self._shape, ids, query_start_loc, context)
        with self._changed:
            self._check()
            slot = self._ledger.submit(seq, tokens)
        try:
            self._source.gather(ids, query_start_loc, context, self._rows[slot, :, :tokens])
        except Exception as error:
            self.fail(error)
            raise
        with self._changed:
            self._ledger.ready(seq)
            self._changed.notify_all()

    def wait(self, seq: int, deadline: float) -> torch.Tensor:
        check_deadline(deadline)
        began = time.monotonic()
        with self._changed:
            self._ledger.check_wait(seq)
            while not self._ledger.is_ready(seq):
                self._check()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(late(seq, deadline - began, self._ledger))
                self._changed.wait(left)
            tokens = self._ledger.take(seq)
        return self._rows[self._ledger.slot(seq), :, :tokens]

    def consumed(self, seq: int) -> None:
        with self._changed:
            self._ledger.consume(seq)

    def buffer(self, slot: int) -> torch.Tensor:
        return self._rows[slot]

    def fail(self, error: BaseException) -> None:
        with self._changed:
            if self._failure is None:
                self._failure = PleFailed(f"no PLE rows will come: {error}")
            self._changed.notify_all()

    def close(self) -> None:
        self.fail(RuntimeError("the backend was closed"))

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure


def late(seq: int, seconds: float, ledger: Ledger) -> str:
    """The sentence of a wait that took too long: which step, and whether anybody asked for it."""
    asked = "" if ledger.is_submitted(seq) else ": nobody has asked for them"
    return f"PLE rows of step {seq} did not come within {max(0.0, seconds):.3g} s{asked}"
