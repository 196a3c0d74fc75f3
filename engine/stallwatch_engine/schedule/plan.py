"""What one step computes: a packed, flat batch without padding."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from stallwatch_engine.sampling.params import SamplingParams
from stallwatch_engine.schedule.request import Finish, RequestId
from stallwatch_engine.state.pages import PageWrite

ON_DEVICE: Final = -1  # no legal token: a feed that was forgotten cannot pass for one


@dataclass(frozen=True, slots=True)
class Feed:
    """`ids[index]` is the id that `step` sampled as its sample number `sample`; only the device has it."""

    index: int
    step: int
    sample: int


@dataclass(frozen=True, slots=True)
class Sample:
    """Row `row`'s last token yields logits; `count` tokens were sampled for this request before."""

    row: int
    request_id: RequestId
    count: int
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step over R rows (requests) and T tokens.

    Before the step, on the stream that runs it: zero the states in the slots `fresh` (their requests begin
    at position 0), zero the pages of `page_writes`, and set those table entries.
    """

    step: int
    request_ids: tuple[RequestId, ...]  # [R]
    slots: tuple[int, ...]  # [R]
    seq_lens: tuple[int, ...]  # [R]: tokens of the request, this step's included
    query_start_loc: tuple[int, ...]  # [R + 1]: where each row's tokens begin
    ids: tuple[int, ...]  # [T]: ON_DEVICE where a feed says so
    positions: tuple[int, ...]  # [T]
    feeds: tuple[Feed, ...]
    samples: tuple[Sample, ...]
    fresh: tuple[int, ...]
    page_writes: tuple[PageWrite, ...]

    @property
    def rows(self) -> int:
        """R."""
        return len(self.slots)

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Update:
    """What a retired step brought one request: a token, an end, or both. An end comes exactly once."""

    request_id: RequestId
    token: int | None
    finish: Finish | None


@dataclass(slots=True)
class PlanBuilder:
    """A step under construction."""

    step: int
    budget: int  # tokens left
    request_ids: list[RequestId] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    seq_lens: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    feeds: list[Feed] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)
    page_writes: list[PageWrite] = field(default_factory=list)

    def add(self, request_id: RequestId, slot: int, ids: tuple[int, ...], first: int) -> int:
        """A row of tokens at positions from `first`; returns its number."""
        self.request_ids.append(request_id)
        self.slots.append(slot)
        self.ids += ids
        self.positions += range(first, first + len(ids))
        self.seq_lens.append(first + len(ids))
        self.starts.append(len(self.ids))
        self.budget -= len(ids)
        return len(self.slots) - 1

    def build(self) -> StepPlan:
        """The finished plan."""
        return StepPlan(
            step=self.step,
            request_ids=tuple(self.request_ids),
            slots=tuple(self.slots),
            seq_lens=tuple(self.seq_lens),
            query_start_loc=tuple(self.starts),
            ids=tuple(self.ids),
            positions=tuple(self.positions),
            feeds=tuple(self.feeds),
            samples=tuple(self.samples),
            fresh=tuple(self.fresh),
            page_writes=tuple(self.page_writes),
        )
