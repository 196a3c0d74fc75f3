"""Which step stands where between submit and consumed. Pure; the backend that owns it holds a lock."""

from __future__ import annotations

from enum import Enum

from stallwatch_engine.ple.errors import OutOfOrder, ProtocolBroken
from stallwatch_engine.streams.errors import OverContract


class Stage(Enum):
    """How far a step has come."""

    SUBMITTED = "submitted"
    READY = "ready"
    TAKEN = "taken"  # handed to the waiter, who reads it


class Ledger:
    """Steps in flight, at most `slots`; step `seq` lives in buffer `seq % slots`."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._stages: dict[int, Stage] = {}
        self._tokens: dict[int, int] = {}
        self._last: int | None = None  # newest submitted
        self._ready: int | None = None  # newest ready

    def slot(self, seq: int) -> int:
        """The buffer of a step."""
        return seq % self.slots

    def submit(self, seq: int, tokens: int) -> int:
        """Enter a step; its slot. OutOfOrder for a gap or a repetition, OverContract when all are in use."""
        if type(seq) is not int or seq < 0:
            raise OutOfOrder(f"step {seq!r}; expected a number from 0")
        if self._last is not None and seq != self._last + 1:
            raise OutOfOrder(f"step {seq} was submitted after step {self._last}")
        if len(self._stages) >= self.slots:
            raise OverContract("PLE steps in flight", self.slots)
        self._stages[seq] = Stage.SUBMITTED
        self._tokens[seq] = tokens
        self._last = seq
        return self.slot(seq)

    def ready(self, seq: int) -> None:
        """The rows of a step were published. ProtocolBroken unless it is the one that is due."""
        due = min(
            (s for s, stage in self._stages.items() if stage is Stage.SUBMITTED), default=None
        )
        if seq != due:
            before = "again" if self._ready is not None and seq <= self._ready else "out of order"
            raise ProtocolBroken(
                f"PLE rows of step {seq} were published {before}; step {due} was due"
            )
        self._stages[seq] = Stage.READY
        self._ready = seq

    def is_ready(self, seq: int) -> bool:
        return self._stages.get(seq) is Stage.READY

    def is_submitted(self, seq: int) -> bool:
        return seq in self._stages

    def take(self, seq: int) -> int:
        """Hand a ready step to its waiter; the number of its tokens."""
        self._stages[seq] = Stage.TAKEN
        return self._tokens[seq]

    def check_wait(self, seq: int) -> None:
        """OutOfOrder for a step that was taken already or is over."""
        over = self._last is not None and seq <= self._last and seq not in self._stages
        if over or self._stages.get(seq) is Stage.TAKEN:
            raise OutOfOrder(f"the rows of step {seq} were handed out before")

    def consume(self, seq: int) -> int:
        """Free the slot of a step that was taken; its slot. OutOfOrder otherwise."""
        if self._stages.get(seq) is not Stage.TAKEN:
            raise OutOfOrder(
                f"step {seq} was reported consumed, and its rows were never handed out"
            )
        if seq != min(self._stages):
            raise OutOfOrder(f"step {seq} was reported consumed before step {min(self._stages)}")
        del self._stages[seq], self._tokens[seq]
        return self.slot(seq)
