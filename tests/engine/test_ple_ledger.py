"""The order of steps between submit and consumed."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stallwatch_engine.ple.errors import OutOfOrder, ProtocolBroken
from stallwatch_engine.ple.ledger import Ledger
from stallwatch_engine.streams.errors import OverContract

SLOTS = 3


class Steps(RuleBasedStateMachine):
    """Whatever is called, no slot is ever used by two steps, and steps come out in order."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(SLOTS)
        self.next = 0
        self.stages: dict[int, str] = {}

    @rule(seq=st.integers(-1, 12))
    def submit(self, seq):
        if seq < 0 or (self.next and seq != self.next) or type(seq) is not int:
            with pytest.raises(OutOfOrder):
                self.ledger.submit(seq, 1)
        elif len(self.stages) == SLOTS:
            with pytest.raises(OverContract):
                self.ledger.submit(seq, 1)
        else:
            assert self.ledger.submit(seq, 1) == seq % SLOTS
            self.stages[seq], self.next = "submitted", seq + 1

    @rule(seq=st.integers(0, 12))
    def ready(self, seq):
        due = [s for s, stage in self.stages.items() if stage == "submitted"]
        if due and seq == min(due):
            self.ledger.ready(seq)
            self.stages[seq] = "ready"
        else:
            with pytest.raises(ProtocolBroken):
                self.ledger.ready(seq)

    @precondition(lambda self: "ready" in self.stages.values())
    @rule()
    def take(self):
        seq = min(s for s, stage in self.stages.items() if stage == "ready")
        assert self.ledger.is_ready(seq)
        assert self.ledger.take(seq) == 1
        self.stages[seq] = "taken"
        with pytest.raises(OutOfOrder, match="handed out before"):
            self.ledger.check_wait(seq)

    @rule(seq=st.integers(0, 12))
    def consume(self, seq):
        if self.stages.get(seq) == "taken" and seq == min(self.stages):
            self.ledger.consume(seq)
            del self.stages[seq]
        else:
            with pytest.raises(OutOfOrder):
                self.ledger.consume(seq)

    @invariant()
    def slots_differ(self):
        assert len({self.ledger.slot(seq) for seq in self.stages}) == len(self.stages)


TestSteps = pytest.mark.slow(Steps.TestCase)
