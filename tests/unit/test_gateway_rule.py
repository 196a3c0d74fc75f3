"""The gateway's word as a finding: reports in, a rule of its own, withdrawn by the first byte."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import ValidationError

from stallwatch.board.image import BoardImage, LaneImage, PauseLease
from stallwatch.control.gateway import GatewayReport
from stallwatch.daemon.gateway import MOST_GATEWAYS, STALE_NS, GatewayDesk
from stallwatch.lifecycle.states import State
from stallwatch.testing.clock import FakeClock
from stallwatch.testing.snapshots import frame, lane, process
from stallwatch.watch.finding import Level, Rule
from stallwatch.watch.memory import Memory, remember
from stallwatch.watch.policy import Policy
from stallwatch.watch.rules import evaluate
from stallwatch.watch.snapshot import EngineFacts, HostFacts, Recall, Silence, Snapshot
from stallwatch.watch.tracker import moved

S = 1_000_000_000


def snapshot(silence: Silence | None, state: State = State.READY, now: int = 100 * S) -> Snapshot:
    facts = EngineFacts("chat", 1, state, ready_ns=1, silence=silence)
    return Snapshot(now_ns=now, engine=facts, image=None, processes={}, exits=(), host=HostFacts())


QUIET = Silence("ab12", "first_token", 50 * S, 40 * S, 3)


def silent(seen: Snapshot, policy: Policy | None = None) -> list[object]:
    found = evaluate(seen, seen.now_ns, policy or Policy())
    return [f for f in found if f.rule is Rule.REQUEST_SILENT]


def test_a_request_without_a_byte_is_a_finding_by_its_limit():
    """Over it OVER, from half of it WARN, before nothing; how many wait is in the notes."""
    (over,) = silent(snapshot(QUIET))
    assert over.level is Level.OVER
    assert (over.elapsed_ns, over.limit_ns) == (50 * S, 40 * S)
    assert "3 are waiting" in over.notes[0]
    (warn,) = silent(snapshot(replace(QUIET, limit_ns=90 * S)))
    assert warn.level is Level.WARN
    assert not silent(snapshot(replace(QUIET, limit_ns=200 * S)))
    assert not silent(snapshot(None))


@pytest.mark.parametrize("state", [State.STARTING, State.DRAINING, State.STOPPED])
def test_only_a_serving_engine_owes_bytes(state):
    """While it starts or drains, other limits judge."""
    assert not silent(snapshot(QUIET, state))


def test_a_pause_raises_this_limit_too():
    """An operator's lease counts for clients as for lanes."""
    assert not silent(snapshot(QUIET), Policy(raised_ns=200 * S))


def with_lanes(*lanes: LaneImage, recall: Recall | None = None, lease: PauseLease | None = None):
    """The quiet engine at 100 s, with a board."""
    image = BoardImage(1, 100 * S, (process(pause=lease),), lanes, ())
    return replace(snapshot(QUIET), image=image, recall=recall or Recall())


def test_a_lease_of_the_engine_itself_excuses_its_silence():
    """While it lasts nothing is said, and its time does not count once it has ended."""
    pause = PauseLease("weight_update", "trainer", 45 * S, 120 * S)
    assert not silent(with_lanes(lane(), lease=pause))
    assert not silent(with_lanes(lane(), recall=Recall(held=((55 * S, 95 * S),))))
    (over,) = silent(with_lanes(lane(), recall=Recall(held=((45 * S, 51 * S),))))
    assert over.elapsed_ns == 49 * S


def test_the_time_of_a_lease_and_of_a_debugger_is_remembered():
    """Look by look, and for as long as they last only."""
    memory, now = Memory(), 100 * S
    pause = PauseLease("weight_update", "trainer", 100 * S, 103 * S)
    for n in range(6):
        owner = process(pause=pause if n < 4 else None)
        image = BoardImage(1, now + n * S, (owner,), (lane(),), ())
        raw = replace(snapshot(QUIET, now=now + n * S), image=image)
        memory, seen = remember(memory, raw, Policy())
    assert seen.recall.held == ((100 * S, 102 * S),)


def test_a_longer_limit_that_somebody_wrote_down_is_not_undercut():
    """A prefill that may take ten minutes is judged by its own limit, as for every other rule."""
    prefill = lane("model", frame("prefill", at=50, limit=600))
    assert not [f for f in silent(with_lanes(prefill)) if f.level is Level.OVER]
    policy = Policy(phases={"prefill": 600 * S})
    assert not silent(with_lanes(lane("model", frame("prefill", at=50))), policy)
    assert silent(with_lanes(lane("model", frame("prefill", at=50))))


def test_compilers_at_work_excuse_it_for_a_while():
    """A new shape in the middle of serving; but not for ever."""
    assert not silent(with_lanes(lane(), recall=Recall(compiled_ns={100: 99 * S})))
    long_ago = with_lanes(lane(), recall=Recall(compiled_ns={100: 999 * S}))
    late = replace(long_ago, now_ns=1000 * S)
    assert silent(late)


def test_a_long_prompt_whose_steps_move_has_more_time():
    """No first token while the model's lane works on: five limits; one between tokens: one limit."""
    working = replace(lane("model", frame("execute_model", at=99.0)), work=7)
    assert not silent(with_lanes(working))
    over = with_lanes(working)
    assert silent(
        replace(over, engine=replace(over.engine, silence=replace(QUIET, limit_ns=9 * S)))
    )
    between = replace(QUIET, phase="between_tokens")
    assert silent(replace(over, engine=replace(over.engine, silence=between)))
    assert silent(with_lanes(replace(working, role="api")))
    assert silent(with_lanes(replace(working, work=0)))


def test_one_byte_withdraws_it():
    """The third look: the same silence stands, another one or none does not."""
    (finding,) = silent(snapshot(QUIET))
    assert not moved(finding, snapshot(QUIET, now=101 * S))
    assert moved(finding, snapshot(replace(QUIET, since_ns=100 * S), now=101 * S))
    assert moved(finding, snapshot(None))


def test_the_desk_forgets_a_gateway_that_says_nothing():
    """A report is worth three seconds, and only for the incarnation that it names."""
    clock = FakeClock()
    desk = GatewayDesk(clock)
    now = clock.monotonic_ns()
    said = {"engine": "chat", "incarnation": 2, "request": "x", "phase": "p", "limit_ns": 1}
    desk.heard(GatewayReport(silent=[{**said, "since_ns": now}]))
    assert desk.silence("chat", 2) == Silence("x", "p", now, 1, 1)
    assert desk.silence("chat", 1) is None
    assert desk.silence("other", 2) is None
    clock.advance((STALE_NS + 1) / 1e9)
    assert desk.silence("chat", 2) is None


def test_a_silence_from_the_future_is_not_believed():
    """Another machine's clock, or a lie: it accuses nobody."""
    clock = FakeClock()
    desk = GatewayDesk(clock)
    later = clock.monotonic_ns() + S
    said = {"engine": "chat", "incarnation": 1, "request": "x", "phase": "p", "limit_ns": 1}
    desk.heard(GatewayReport(silent=[{**said, "since_ns": later}]))
    assert desk.silence("chat", 1) is None


@pytest.mark.parametrize(
    "report",
    [
        {"in_flight": -1},
        {"unknown": 1},
        {"totals": {f"k{n}": 1 for n in range(65)}},
        {"silent": [{"engine": "chat"}]},
        {"silent": [{"engine": "x" * 81, "incarnation": 1, "request": "", "phase": "",
                     "since_ns": 1, "limit_ns": 1}]},
        {"failures": {"x": "y"}},
    ],
)  # fmt: skip
def test_a_report_is_bounded_and_typed(report):
    """What no gateway of ours would say is refused at the door."""
    with pytest.raises(ValidationError):
        GatewayReport(**report)


def test_a_stop_waits_for_what_the_gateway_counts_and_not_for_a_dead_gateway():
    """Unknown until it has spoken since the stop began; then its count; nothing once it is silent."""
    clock = FakeClock()
    desk = GatewayDesk(clock)
    clock.advance(100)
    assert not desk.owes("chat", clock.monotonic_ns())  # there is no gateway at all
    desk.heard(GatewayReport(replicas={"chat": 0}))
    clock.advance(0.1)
    began = clock.monotonic_ns()
    assert desk.owes("chat", began)
    desk.heard(GatewayReport(replicas={"chat": 2}))
    assert desk.owes("chat", began)
    desk.heard(GatewayReport(replicas={"chat": 0}))
    assert not desk.owes("chat", began)
    desk.heard(GatewayReport(replicas={"chat": 1}))
    clock.advance((STALE_NS + 1) / 1e9)
    assert not desk.owes("chat", began)


def test_gateways_do_not_speak_for_each_other():
    """The silence of one is not ended by the report of another, nor are its requests."""
    clock = FakeClock()
    clock.advance(100)
    desk = GatewayDesk(clock)
    since = clock.monotonic_ns() - 50 * S
    said = {"engine": "chat", "incarnation": 1, "request": "x", "phase": "p", "limit_ns": 60 * S}
    desk.heard(
        GatewayReport(source="a", replicas={"chat": 1}, silent=[{**said, "since_ns": since}])
    )
    desk.heard(GatewayReport(source="b", replicas={"chat": 0}))
    silence = desk.silence("chat", 1)
    assert silence is not None
    assert silence.since_ns == since
    assert desk.owes("chat", 0)
    desk.heard(GatewayReport(source="a"))
    assert desk.silence("chat", 1) is None
    assert not desk.owes("chat", 0)


def test_gateways_that_are_remembered_are_few():
    """Whoever posts under ever new names fills nothing."""
    desk = GatewayDesk(FakeClock())
    for n in range(1000):
        desk.heard(GatewayReport(source=str(n)))
    assert len(desk._heard) == MOST_GATEWAYS


@pytest.mark.parametrize("ahead", [-90 * S, 5000 * S])
def test_another_machines_clock_accuses_nobody(ahead):
    """Its moments are told by their age, and stay what they were from report to report."""
    clock = FakeClock()
    clock.advance(100)
    desk = GatewayDesk(clock)
    said = {"engine": "chat", "incarnation": 1, "request": "x", "phase": "p", "limit_ns": 60 * S}
    began = clock.monotonic_ns() - 5 * S
    seen = []
    for late in (0.0, 0.2, 0.1):
        clock.advance(1)
        theirs = clock.monotonic_ns() + ahead - int(late * S)
        silent = [{**said, "since_ns": began + ahead}]
        desk.heard(GatewayReport(source="far", now_ns=theirs, silent=silent))
        seen.append(desk.silence("chat", 1))
    assert {s.since_ns for s in seen if s is not None} == {began}
    assert None not in seen
