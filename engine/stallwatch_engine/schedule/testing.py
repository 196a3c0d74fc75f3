"""A device to test a scheduler with: it believes nothing, its tokens depend on the whole history of a slot.

Each slot holds the tokens that were really computed there, each page the slot's lease that wrote it. Any
wrong id, position, slot, page or feed changes a later token or trips an assertion.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from stallwatch_engine.schedule.limits import Limits
from stallwatch_engine.schedule.plan import ON_DEVICE, StepPlan, Update
from stallwatch_engine.schedule.request import RequestId, RequestSpec
from stallwatch_engine.schedule.scheduler import Scheduler

VOCAB = 50
EOS = 7


def token_after(history: list[int], count: int, seed: int) -> int:
    """A sampled token: a function of all tokens before it, the seed and the count."""
    value = seed * 1_000_003 + count
    for each in history:
        value = (value * 31 + each + 1) & 0xFFFFFFFF
    return (value >> 7) % VOCAB


def alone(spec: RequestSpec) -> list[int]:
    """The answer of a request that has the whole engine to itself."""
    history = list(spec.prompt)
    answer: list[int] = []
    while len(answer) < spec.max_tokens:
        answer.append(token_after(history, len(answer), spec.params.seed))
        history.append(answer[-1])
        if answer[-1] in spec.stop_ids:
            break
    return answer


@dataclass
class Device:
    """Runs plans in order; results are handed out when `finish_oldest` is called."""

    limits: Limits
    history: dict[int, list[int]] = field(default_factory=dict)  # by slot
    tables: dict[int, dict[int, int]] = field(default_factory=dict)
    lease: dict[int, int] = field(default_factory=dict)  # slot: which use of it
    owner: dict[int, tuple[int, int]] = field(default_factory=dict)  # page: slot and use
    results: dict[int, list[int]] = field(default_factory=dict)  # step: sampled ids
    flying: deque[tuple[StepPlan, set[int], set[int]]] = field(default_factory=deque)
    most_tokens: int = 0

    def launch(self, plan: StepPlan) -> None:
        """Run a step. AssertionError if the plan contradicts the limits, itself or a step in flight."""
        limits = self.limits
        assert 1 <= plan.tokens <= limits.token_budget
        assert 1 <= plan.rows <= limits.max_seqs
        assert len(self.flying) < limits.max_in_flight
        assert len(set(plan.slots)) == plan.rows
        assert all(0 <= slot < limits.slots for slot in plan.slots)
        busy_slots = {slot for _, slots, _ in self.flying for slot in slots}
        busy_pages = {page for _, _, pages in self.flying for page in pages}
        for slot in plan.fresh:
            assert slot not in busy_slots, "a slot is reused under a step in flight"
            self.history[slot] = []
            self.tables[slot] = {}
            self.lease[slot] = self.lease.get(slot, 0) + 1
        for write in plan.page_writes:
            assert 0 <= write.page < limits.pages
            assert write.page not in busy_pages, "a page is reused under a step in flight"
            assert write.index == len(self.tables[write.slot])
            self.tables[write.slot][write.index] = write.page
            self.owner[write.page] = write.slot, self.lease[write.slot]
        ids = list(plan.ids)
        for feed in plan.feeds:
            assert ids[feed.index] == ON_DEVICE
            ids[feed.index] = self.results[feed.step][feed.sample]
        assert ON_DEVICE not in ids
        pages: set[int] = set()
        for row in range(plan.rows):
            pages |= self._row(plan, row, ids)
        self.results[plan.step] = [
            token_after(self.history[plan.slots[s.row]], s.count, s.params.seed)
            for s in plan.samples
        ]
        self.flying.append((plan, set(plan.slots), pages))
        self.most_tokens = max(self.most_tokens, plan.tokens)

    def finish_oldest(self) -> tuple[int, list[int]]:
        """The number and the sampled ids of the oldest step."""
        plan, _, _ = self.flying.popleft()
        return plan.step, self.results[plan.step]

    def _row(self, plan: StepPlan, row: int, ids: list[int]) -> set[int]:
        slot = plan.slots[row]
        lo, hi = plan.query_start_loc[row : row + 2]
        first = len(self.history[slot])
        assert list(plan.positions[lo:hi]) == list(range(first, first + hi - lo))
        assert hi > lo
        self.history[slot] += ids[lo:hi]
        assert plan.seq_lens[row] == len(self.history[slot])
        table = self.tables[slot]
        needed = self.limits.pages_for(plan.seq_lens[row])
        pages = {table[index] for index in range(needed)}
        for page in pages:
            assert self.owner[page] == (slot, self.lease[slot]), "a page has two owners"
        return pages


@dataclass
class Engine:
    """Scheduler and device, and what every request received."""

    limits: Limits
    scheduler: Scheduler = field(init=False)
    device: Device = field(init=False)
    answers: dict[RequestId, list[int]] = field(default_factory=dict)
    ends: dict[RequestId, list[object]] = field(default_factory=dict)
    started: list[RequestId] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits)
        self.device = Device(self.limits)

    def step(self) -> StepPlan | None:
        """Schedule and launch one step, if there is one."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self.started += [r for r in plan.request_ids if r not in self.started]
            self.device.launch(plan)
        return plan

    def retire(self, failed: frozenset[int] = frozenset()) -> tuple[Update, ...]:
        """The oldest step ends; its samples in `failed` were not finite."""
        step, ids = self.device.finish_oldest()
        updates = self.scheduler.retire(step, ids, failed)
        for update in updates:
            assert not self.ends.get(update.request_id), "news after the end"
            if update.token is not None:
                self.answers.setdefault(update.request_id, []).append(update.token)
            if update.finish is not None:
                self.ends.setdefault(update.request_id, []).append(update.finish)
        return updates

    def drain(self, most: int = 10_000) -> None:
        """Run until nothing is unfinished or in flight, as far ahead as the contract allows."""
        for _ in range(most):
            if not self.scheduler.unfinished and not self.device.flying:
                return
            if self.step() is None:
                assert self.device.flying, "unfinished requests, nothing in flight, and no plan"
                self.retire()
        raise AssertionError("requests do not end")

    def idle(self) -> None:
        """Everything is back where it came from."""
        load = self.scheduler.load
        assert (load.waiting, load.running, load.in_flight, load.quarantined_pages) == (0, 0, 0, 0)
        assert (load.free_pages, load.free_slots) == (self.limits.pages, self.limits.slots)
