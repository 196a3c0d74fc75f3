"""One request: what was asked for, and how far it has come."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TypeAlias

from stallwatch_engine.sampling.params import GREEDY, SamplingParams
from stallwatch_engine.state.pages import NULL

RequestId: TypeAlias = (
    str | int
)  # whatever names a request for its owner; never used twice at a time


class Finish(enum.Enum):
    """Why a request ended."""

    STOP = "stop"  # an end token, or a stop string that the reader of the text saw
    LENGTH = "length"  # max_tokens
    ABORT = "abort"  # asked for: disconnect, deadline
    ERROR = "error"  # its logits were not finite


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """What was asked for. `stop_ids` end the answer and are part of it; empty to run to `max_tokens`."""

    id: RequestId
    prompt: tuple[int, ...]
    max_tokens: int
    params: SamplingParams = GREEDY
    stop_ids: frozenset[int] = frozenset()


@dataclass(slots=True, eq=False)
class Request:
    """How far it has come. Belongs to the scheduler; nobody else writes here.

    `scheduled` tokens have been handed to steps since it last began at position 0; `pending` sampled ids
    exist on the device and are not known here yet. `steps` in flight refer to its current lease.
    """

    spec: RequestSpec
    outputs: list[int] = field(default_factory=list)
    scheduled: int = 0
    pending: int = 0
    source: tuple[int, int] | None = None  # step and sample of the newest pending id
    slot: int = NULL
    pages: list[int] = field(default_factory=list)
    steps: set[int] = field(default_factory=set)
    finish: Finish | None = None
    preemptions: int = 0

    @property
    def known(self) -> int:
        """Tokens whose ids are known here."""
        return len(self.spec.prompt) + len(self.outputs)

    @property
    def length(self) -> int:
        """Tokens that exist, known here or on the device alone."""
        return self.known + self.pending

    @property
    def wanted(self) -> int:
        """Tokens that the next step should compute; 0 while all samples it may have are under way."""
        if len(self.outputs) + self.pending >= self.spec.max_tokens:
            return 0
        return self.length - self.scheduled

    def ids(self, lo: int, hi: int) -> tuple[int, ...]:
        """Known ids at positions `lo` to `hi`; shorter where they are not known."""
        prompt = self.spec.prompt
        start = len(prompt)
        return (*prompt[lo:hi], *self.outputs[max(0, lo - start) : max(0, hi - start)])
