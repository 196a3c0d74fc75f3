"""One stall from its confirmation to its report: what is counted, and which limits are written down."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from stallwatch.daemon.case import StallCase
from stallwatch.daemon.counters import Totals
from stallwatch.daemon.orders import Orders
from stallwatch.evidence.ledger import Ledger
from stallwatch.evidence.redact import Redactor
from stallwatch.lifecycle.events import Event, EventKind
from stallwatch.testing.snapshots import T0, frame, lane, ns, snapshot
from stallwatch.watch.notice import Confirmed
from stallwatch.watch.policy import Policy
from stallwatch.watch.rules import evaluate
from stallwatch.watch.snapshot import Snapshot
from stallwatch.watch.tracker import Tracker, observe

LIMIT_S = 10.0
POLICY = Policy(default_ns=ns(LIMIT_S), compile_steps=0)


class Clock:
    def monotonic_ns(self) -> int:
        return ns(T0 + 20)

    def wall(self) -> float:
        return 1_800_000_000.0


class Ladder:
    """Finds nothing to look at."""

    def first(self, targets: object, *, deadline_s: float) -> dict[int, Any]:
        return {}

    def more(self, *_: object, **__: object) -> list[Mapping[int, Any]]:
        return []

    def gpu(self, *, deadline_s: float) -> dict[str, Any]:
        return {}


class Patient:
    """As much of an incarnation as a case needs."""

    name, incarnation, command, caches, waits_for = "chat", 1, ("serve",), (), ""
    half: tuple[int, Mapping[int, Any]] = (0, {})

    def __init__(self, third: Snapshot) -> None:
        self.redactor, self.ladder, self.third, self.limits = Redactor(), Ladder(), third, POLICY

    def policy(self) -> Policy:
        return self.limits

    def look(self, _suspects: frozenset[int]) -> Snapshot:
        return self.third

    def targets(self, _snapshot: Snapshot) -> list[Any]:
        return []

    def log_tail(self, _lines: int) -> list[str]:
        return []

    def held(self) -> int:
        return 0

    def told(self, _failure_id: str, _since_ns: int) -> int:
        return 0

    def latest(self) -> None:
        return None


def still(at: float, **fields: Any) -> Snapshot:
    """A lane that has been in one phase since T0."""
    return snapshot(T0 + at, [lane("model", frame(at=T0), **fields)])


def confirmed() -> Confirmed:
    """The finding of two looks, as the judge tells it."""
    tracker, at = Tracker(), LIMIT_S - 0.1
    while at < 2 * LIMIT_S:
        seen = still(at)
        tracker, notices = observe(tracker, evaluate(seen, seen.now_ns, POLICY), seen, POLICY)
        for notice in notices:
            if isinstance(notice, Confirmed):
                return notice
        at += 0.1
    raise AssertionError("never confirmed")


class Runner:
    """As much of a runner as its orders need."""

    name = "chat"

    def __init__(self, ledger: Ledger) -> None:
        self.parts = SimpleNamespace(totals=Totals(), clock=Clock(), ledger=ledger)
        self.posted: list[Event] = []
        self.problems: list[str] = []

    def post(self, event: Event) -> None:
        self.posted.append(event)

    def problem(self, text: str) -> None:
        self.problems.append(text)

    def counts(self) -> Any:
        return self.parts.totals.read(looks=0, late_looks=0, log_dropped={})


@pytest.fixture
def runner(tmp_path) -> Iterator[Runner]:
    ledger = Ledger(tmp_path, clock=Clock())
    yield Runner(ledger)
    ledger.close()


def begun(runner: Runner, patient: Patient) -> StallCase:
    """The case that the orders make of a confirmed finding, decided."""
    orders = Orders(runner)  # type: ignore[arg-type]
    orders.incarnation, orders.finding = patient, confirmed()  # type: ignore[assignment]
    orders._collect()
    case = orders.case
    assert case is not None
    assert case.decided.wait(10)
    return case


def finished(case: StallCase) -> None:
    case.declared("restart")
    case.finish(wait_answers=False)
    assert case.done.is_set()


def test_a_verdict_is_counted_with_its_latency_once(runner):
    """As many latencies as stalls: from the limit to the look that confirmed it."""
    case = begun(runner, Patient(still(11.0)))
    finished(case)
    counts = runner.counts()

    assert runner.problems == []
    assert sum(counts.stalls.values()) == 1
    assert [engine for engine, _ in counts.detection_s] == ["chat"]
    assert counts.detection_s[0][1] == pytest.approx(0.1, abs=0.15)
    finished(case)
    assert runner.counts().detection_s == []


def test_a_finding_that_is_withdrawn_has_no_latency(runner):
    """It moved at the third look: confirmed, but no stall."""
    begun(runner, Patient(still(11.0, work=1, beats=2)))

    assert [event.kind for event in runner.posted] == [EventKind.WITHDRAWN]
    assert runner.counts().detection_s == []


def test_a_report_shows_the_limits_that_were_in_force_when_it_was_found(runner):
    """A pause that an operator asks for after the verdict raises nothing that is written of it."""
    patient = Patient(still(11.0))
    case = begun(runner, patient)
    patient.limits = replace(POLICY, raised_ns=ns(600))
    finished(case)
    assert case.failure is not None
    report = runner.parts.ledger.get(case.failure.id)

    assert report["limit_s"] == LIMIT_S
    assert [each["limit_s"] for row in report["processes"] for each in row["lanes"]] == [LIMIT_S]
