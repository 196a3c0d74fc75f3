"""A worker's scheduler and executor without processes around them: requests in, tokens and logits out.

Steps run ahead as far as the contract allows; the test decides when one retires.
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from stallwatch.heartbeat import Board
from stallwatch_engine.faults import Faults
from stallwatch_engine.output.answers import Failure
from stallwatch_engine.sampling.sampler import results
from stallwatch_engine.schedule.request import RequestSpec
from stallwatch_engine.schedule.scheduler import Scheduler
from stallwatch_engine.worker.build import Built, build
from stallwatch_engine.worker.options import WorkerOptions

PATIENCE_S = 60.0


class Rig:
    """`tokens` and `logits` by request, one row of logits for each token."""

    def __init__(self, built: Built, answers: queue.SimpleQueue) -> None:
        self.built = built
        self.executor = built.executor
        self.scheduler = Scheduler(built.limits)
        self.tokens: dict[Any, list[int]] = {}
        self.logits: dict[Any, list[torch.Tensor]] = {}
        self.finished: dict[Any, Any] = {}
        self.plans: list[Any] = []
        self.shapes: list[tuple[int, int]] = []
        self._answers = answers
        self._found: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        original = built.executor.forward.finish

        def recording(*counts: int) -> torch.Tensor:
            logits = original(*counts)
            self._found.put(logits.float().clone())
            return logits

        built.executor.forward.finish = recording

    def add(self, name: Any, prompt, max_tokens: int = 16, **more: Any) -> None:
        self.scheduler.add(RequestSpec(name, tuple(prompt), max_tokens, **more))

    def step(self) -> bool:
        """Launch one step, if there is one."""
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        self.plans.append(plan)
        self.shapes.append((plan.tokens, plan.rows))
        self.executor.launch(plan)
        return True

    def retire(self) -> None:
        """The oldest step's results."""
        plan = self.plans.pop(0)
        answer = self._answers.get(timeout=PATIENCE_S)
        if isinstance(answer, Failure):
            raise answer.error
        assert answer.seq == plan.step
        logits = self._found.get(timeout=PATIENCE_S)
        found = results(answer.tensors, [each.params for each in plan.samples])
        failed = {n for n, each in enumerate(found) if each.failed}
        rows = {each.request_id: row for each, row in zip(plan.samples, logits, strict=True)}
        updates = self.scheduler.retire(plan.step, [each.token for each in found], failed)
        for update in updates:
            if update.token is not None:
                self.tokens.setdefault(update.request_id, []).append(update.token)
                self.logits.setdefault(update.request_id, []).append(rows[update.request_id])
            if update.finish is not None:
                self.finished[update.request_id] = update.finish

    def drain(self) -> None:
        """Until nothing is unfinished or in flight."""
        while self.scheduler.unfinished or self.plans:
            if not self.step():
                self.retire()

    def alone(self, prompt, max_tokens: int = 16, **more: Any) -> tuple[list[int], torch.Tensor]:
        """Tokens and logits of a request that has the engine to itself."""
        name = f"alone-{len(self.tokens)}"
        self.add(name, prompt, max_tokens, **more)
        self.drain()
        return self.tokens[name], torch.stack(self.logits[name])

    def addresses(self) -> dict[str, int]:
        """Where the static buffers lie."""
        buffers, act = self.executor.buffers, self.executor.forward.act
        ring = self.executor.ring
        found = {f"in.{n}": getattr(buffers, n) for n in buffers.__slots__}
        found |= {f"act.{n}": getattr(act, n) for n in act.__slots__}
        found |= {"ring.ids": ring.ids, "tables": self.built.stores.tables.entries}
        return {name: tensor.data_ptr() for name, tensor in found.items()}


@contextlib.contextmanager
def rig(folder: Path, *, faults: Faults | None = None, **options: Any) -> Iterator[Rig]:
    """A rig over the checkpoint in `folder`, with the worker's own start and end."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    board = Board(None, "worker", 0, 0)
    given = WorkerOptions(model=str(folder), **{"max_model_len": 1024, **options})
    opened = build(given, board, board.lane("scheduler"), answers.put, faults=faults or Faults())
    with opened as built:
        yield Rig(built, answers)


def sha(tokens) -> str:
    """What a sequence of tokens is compared by."""
    return hashlib.sha256(" ".join(map(str, tokens)).encode()).hexdigest()
