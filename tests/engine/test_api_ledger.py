"""The ledger: any interleaving ends each request exactly once, and what comes later is counted."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stallwatch_engine.api.errors import internal
from stallwatch_engine.api.ledger import Answer, Ledger, NeverOpened, Source

SOURCES = st.sampled_from(list(Source))


class AnyInterleaving(RuleBasedStateMachine):
    """Opens and ends in any order, beside a plain record of who was first."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.winner: dict[int, Source | None] = {}
        self.late: Counter[Source] = Counter()

    @rule()
    def open(self) -> None:
        request = self.ledger.open()
        assert request not in self.winner
        self.winner[request] = None

    @rule(source=SOURCES, data=st.data())
    def settle(self, source: Source, data: st.DataObject) -> None:
        request = data.draw(st.integers(1, len(self.winner) + 2))
        if request not in self.winner:
            with pytest.raises(NeverOpened):
                self.ledger.settle(request, source)
            return
        first = self.winner[request] is None
        assert self.ledger.settle(request, source) is first
        if first:
            self.winner[request] = source
        else:
            self.late[source] += 1

    @rule(source=SOURCES)
    def settle_all(self, source: Source) -> None:
        """What a FAILURE of the engine does."""
        for request in self.ledger:
            assert self.ledger.settle(request, source)
            self.winner[request] = source
        assert len(self.ledger) == 0

    @invariant()
    def agrees(self) -> None:
        waiting = [request for request, source in self.winner.items() if source is None]
        assert list(self.ledger) == waiting
        assert len(self.ledger) == len(waiting)
        assert self.ledger.settled == Counter(s for s in self.winner.values() if s is not None)
        assert self.ledger.late == self.late


TestAnyInterleaving = AnyInterleaving.TestCase


@given(st.permutations(list(Source)), st.integers(1, 5))
def test_of_all_who_race_for_one_request_the_first_wins_and_the_rest_are_counted(order, requests):
    """Exactly one True for each request, whatever the order of the seven."""
    ledger = Ledger()
    opened = [ledger.open() for _ in range(requests)]
    won = [[ledger.settle(request, source) for source in order] for request in opened]

    assert all(answers == [True] + [False] * (len(order) - 1) for answers in won)
    assert ledger.settled == {order[0]: requests}
    assert ledger.late == dict.fromkeys(order[1:], requests)


def test_a_waiting_request_cannot_be_dropped_by_mistake():
    """drop is for what comes after the end: before it, it would lose an answer."""
    ledger = Ledger()
    request = ledger.open()
    with pytest.raises(ValueError, match="still waiting"):
        ledger.drop(request, Source.OUTPUT)


@pytest.mark.parametrize("request_id", [0, -1, 1, 2])
def test_an_id_that_was_never_given_is_an_error_not_a_late_result(request_id):
    """A worker that makes up ids is broken, not slow."""
    ledger = Ledger()
    with pytest.raises(NeverOpened):
        ledger.drop(request_id, Source.OUTPUT)

    assert not ledger.late


def test_an_answer_is_either_a_finish_or_an_error():
    """Nothing in between can be written to a client."""
    assert Answer(Source.OUTPUT, finish="stop").error is None
    for wrong in ({}, {"finish": "stop", "error": internal("x")}):
        with pytest.raises(ValueError, match="either"):
            Answer(Source.OUTPUT, **wrong)
