"""Random histories of arrivals, aborts, failures and retirements keep every invariant of the scheduler."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stallwatch_engine.sampling.params import SamplingParams
from stallwatch_engine.schedule.errors import RequestTooLong
from stallwatch_engine.schedule.limits import Limits
from stallwatch_engine.schedule.request import Finish, RequestSpec
from stallwatch_engine.schedule.testing import EOS, VOCAB, Engine, alone
from stallwatch_engine.state.pages import NULL


class Histories(RuleBasedStateMachine):
    """The device asserts ids, positions, feeds, ownership and budgets; here: order, ends, answers, leaks."""

    @initialize(
        rows=st.tuples(st.sampled_from([1, 2, 3, 8]), st.integers(1, 20), st.booleans()),
        cache=st.tuples(st.integers(10, 28), st.sampled_from([1, 4])),
        in_flight=st.integers(1, 3),
        chunk=st.none() | st.integers(1, 8),
    )
    def begin(self, rows, cache, in_flight, chunk):
        (max_seqs, budget, chunked), (tokens, page_size) = rows, cache
        pages = tokens // page_size
        most = min(24, pages * page_size)
        self.engine = Engine(
            Limits(
                max_seqs=max_seqs,
                token_budget=max(budget, max_seqs, 0 if chunked else most),
                max_model_len=24,
                page_size=page_size,
                pages=pages,
                max_in_flight=in_flight,
                chunked=chunked,
                max_chunk=chunk,
            )
        )
        self.specs: dict[str, RequestSpec] = {}
        self.ended_by_us: set[str] = set()
        self.failed: set[str] = set()

    @rule(
        crowd=st.lists(
            st.tuples(
                st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
                st.integers(1, 12),
                st.booleans(),
            ),
            min_size=1,
            max_size=4,
        )
    )
    def arrive(self, crowd):
        for prompt, max_tokens, stops in crowd:
            spec = RequestSpec(
                id=f"r{len(self.specs)}",
                prompt=tuple(prompt),
                max_tokens=max_tokens,
                params=SamplingParams(seed=len(self.specs)),
                stop_ids=frozenset({EOS, 1, 2, 3, 4}) if stops else frozenset(),
            )
            if len(prompt) + max_tokens > self.engine.limits.capacity:
                with pytest.raises(RequestTooLong):
                    self.engine.scheduler.add(spec)
                continue
            self.engine.scheduler.add(spec)
            self.specs[spec.id] = spec

    @rule(times=st.integers(1, 4))
    def step(self, times):
        scheduler = self.engine.scheduler
        for _ in range(times):
            wanting = [each for each in scheduler._running if each.wanted]
            plan = self.engine.step()
            if plan is None:
                break
            chosen = {each.spec.id for each in wanting} & set(plan.request_ids)
            # the oldest come first; budgets leave nobody out, only pages do
            assert [each.spec.id for each in wanting[: len(chosen)]] == list(
                plan.request_ids[: len(chosen)]
            )
            left_out = [each for each in wanting[len(chosen) :] if each in scheduler._running]
            assert not left_out or not scheduler.load.free_pages

    @rule(times=st.integers(1, 12))
    def run_on(self, times):
        for _ in range(times):
            self.step(1)
            if len(self.engine.device.flying) == self.engine.limits.max_in_flight:
                self.engine.retire()

    @precondition(lambda self: self.engine.device.flying)
    @rule()
    def retire(self):
        self.engine.retire()

    @precondition(lambda self: self.engine.device.flying)
    @rule(data=st.data())
    def fail_a_row(self, data):
        plan = self.engine.device.flying[0][0]
        bad = data.draw(st.sets(st.sampled_from(range(max(1, len(plan.samples)))), max_size=2))
        bad = {number for number in bad if number < len(plan.samples)}
        self.engine.retire(frozenset(bad))
        self.failed |= {plan.samples[number].request_id for number in bad}

    @precondition(lambda self: self.specs)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.specs)))
        if self.engine.scheduler.end(name, Finish.ABORT):
            self.ended_by_us.add(name)
            assert not self.engine.scheduler.end(name), "a second end"

    @invariant()
    def first_come_first_started(self):
        if not hasattr(self, "engine"):
            return
        order = [name for name in self.specs if name in self.engine.started]
        assert self.engine.started == order
        first_not_started = next((n for n in self.specs if self._waits_unstarted(n)), None)
        if first_not_started is not None and self.engine.started:
            names = list(self.specs)
            assert names.index(self.engine.started[-1]) < names.index(first_not_started)

    @invariant()
    def who_runs_came_before_who_waits(self):
        if not hasattr(self, "engine"):
            return
        scheduler = self.engine.scheduler
        arrivals = list(self.specs)
        order = [*scheduler._running, *scheduler._waiting]
        places = [arrivals.index(each.spec.id) for each in order]
        assert places == sorted(places)

    @invariant()
    def pages_add_up(self):
        if not hasattr(self, "engine"):
            return
        scheduler = self.engine.scheduler
        held = sum(len(each.pages) for each in scheduler._running)
        load = scheduler.load
        assert held + load.free_pages + load.quarantined_pages == self.engine.limits.pages
        slots = load.running + load.free_slots + scheduler._quarantine.slots
        assert slots == self.engine.limits.slots
        assert not any(each.slot != NULL or each.pages for each in scheduler._waiting)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.engine.drain()
        self.engine.idle()
        for name, spec in self.specs.items():
            answer = self.engine.answers.get(name, [])
            expected = alone(spec)
            assert answer == expected[: len(answer)], "not the tokens of a run alone"
            if name in self.ended_by_us or name in self.failed:
                continue
            assert answer == expected
            assert len(self.engine.ends[name]) == 1

    def _waits_unstarted(self, name):
        waiting = {each.spec.id for each in self.engine.scheduler._waiting}
        return name in waiting and name not in self.engine.started


Histories.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestHistories = pytest.mark.slow(Histories.TestCase)
