"""A second registered rank of an engine's offload process: asks for what the first asks for, keeps what it gets."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import torch

from stallwatch_engine.ple import open as opening
from stallwatch_engine.ple.offload.client import OffloadBackend
from stallwatch_engine.ple.offload.process import OffloadProcess

PATIENCE_S = 60.0


class Follower(threading.Thread):
    """Rank 1, a thread that reads its rows as soon as it may."""

    def __init__(self, backend: OffloadBackend) -> None:
        super().__init__(name="rank-1", daemon=True)
        self.backend = backend
        self.rows: dict[int, torch.Tensor] = {}
        self.error: BaseException | None = None
        self._steps: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.start()

    def put(self, *step: Any) -> None:
        self._steps.put(step)

    def end(self) -> None:
        """After what was put."""
        self._steps.put(None)
        self.join(PATIENCE_S)
        self.backend.close()

    def run(self) -> None:
        try:
            while (step := self._steps.get(timeout=PATIENCE_S)) is not None:
                seq, *inputs = step
                self.backend.submit(seq, *inputs)
                self.rows[seq] = self.backend.wait(seq, time.monotonic() + PATIENCE_S).clone()
                self.backend.consumed(seq)
        except BaseException as error:
            self.error = error


class Leader(OffloadBackend):
    """Rank 0, the engine's own, and the other one beside it."""

    def __init__(self, process: OffloadProcess, *arguments: Any, **more: Any) -> None:
        super().__init__(process, *arguments, **more)
        self.follower = Follower(OffloadBackend(process, *arguments, rank=1, **more))
        self.rows: dict[int, torch.Tensor] = {}

    def submit(self, seq: int, *inputs: torch.Tensor) -> None:
        copies = [each.clone() for each in inputs]
        super().submit(seq, *inputs)
        self.follower.put(seq, *copies)

    def wait(self, seq: int, deadline: float) -> torch.Tensor:
        rows = super().wait(seq, deadline)
        self.rows[seq] = rows.clone()
        return rows


def register_two(monkeypatch: Any) -> None:
    """From now on every offload process has two ranks, and an engine's backend is a Leader."""
    monkeypatch.setattr(opening, "OffloadProcess", lambda *a, **k: OffloadProcess(*a, ranks=2, **k))
    monkeypatch.setattr(opening, "OffloadBackend", Leader)
