"""An engine that serves others past a gateway is not accused of the one request that it lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway_helpers import CHAT, Peer, post, running, until
from stallwatch.board.image import BoardImage
from stallwatch.control.gateway import GatewayReport
from stallwatch.daemon.gateway import GatewayDesk
from stallwatch.daemon.gateway_past import Past
from stallwatch.lifecycle.states import State
from stallwatch.testing.clock import FakeClock
from stallwatch.testing.snapshots import lane, process
from stallwatch.watch.finding import Rule
from stallwatch.watch.policy import Policy
from stallwatch.watch.rules import evaluate
from stallwatch.watch.snapshot import EngineFacts, HostFacts, Silence, Snapshot
from stallwatch.watch.tracker import moved

S = 1_000_000_000
SAID = {"engine": "chat", "incarnation": 1, "request": "x", "phase": "first_token"}


def board(pending: int, steps: int) -> BoardImage:
    """A front end that holds requests, and a worker that has done steps."""
    front = process(role="api", pending=pending)
    return BoardImage(1, 0, (front, process(pid=101)), (replace(lane("model"), work=steps),), ())


def looks(past: Past, *, pending, known: int, seconds: int = 5, steps: bool = True) -> int:
    """Ten looks a second; what it has served last, in ns from now on."""
    for n in range(seconds * 10):
        now = 100 * S + n * S // 10
        past.look(board(pending(n) if callable(pending) else pending, n * steps), now, known)
    return past.served_ns


def test_steps_for_more_requests_than_gateways_know_of_are_for_others():
    """Two wait in the engine, one at the gateways, and the model works: somebody else is served."""
    assert looks(Past(1), pending=2, known=1) == 100 * S + 49 * S // 10


@pytest.mark.parametrize(
    ("pending", "known", "steps"),
    [(1, 1, True), (2, 2, True), (2, 1, False), (0, 1, True), (lambda n: 2 if n % 10 else 1, 1, True)],
    ids=["its own", "as many", "no steps", "no gauge", "the gateway's count is a second old"],
)  # fmt: skip
def test_steps_that_may_be_for_the_silent_request_prove_nothing(pending, known, steps):
    """Ticking is not progress, and a broken engine computes too."""
    assert looks(Past(1), pending=pending, known=known, steps=steps) == 0


def test_what_was_served_once_is_not_forgotten_when_the_others_have_gone():
    """The silence is counted from there, and does not become a stall in one look."""
    past = Past(1)
    served = looks(past, pending=2, known=1)
    past.look(board(1, 1000), 106 * S, 1)
    assert past.served_ns == served


def desk(clock: FakeClock) -> tuple[GatewayDesk, int]:
    clock.advance(100)
    return GatewayDesk(clock), clock.monotonic_ns()


def test_another_gateways_bytes_are_told_with_the_silence():
    """Gateway a waits in vain, b had a byte a moment ago: both facts are in one silence."""
    clock = FakeClock()
    found, now = desk(clock)
    since = now - 50 * S
    silent = [{**SAID, "since_ns": since, "limit_ns": 60 * S}]
    assert found.heard(GatewayReport(source="b", bytes_ns={"chat": now - S})) == []
    assert found.heard(GatewayReport(source="a", silent=silent)) == ["chat"]
    told = found.silence("chat", 1)
    assert told is not None
    assert (told.since_ns, told.others_ns) == (since, now - S)
    found.heard(GatewayReport(source="b", bytes_ns={"chat": since - S}))
    told = found.silence("chat", 1)
    assert told is not None
    assert told.others_ns == 0
    assert found.heard(GatewayReport(source="a", silent=silent)) == []


def test_a_gateways_own_bytes_are_its_own_to_judge():
    """It has told the silence in spite of them."""
    clock = FakeClock()
    found, now = desk(clock)
    silent = [{**SAID, "since_ns": now - 50 * S, "limit_ns": 60 * S}]
    assert found.heard(GatewayReport(source="a", silent=silent, bytes_ns={"chat": now - S})) == []
    told = found.silence("chat", 1)
    assert told is not None
    assert told.others_ns == 0


def test_the_boards_word_reaches_the_silence_and_the_gateway():
    """Its lanes tell of others: the gateway hears it in the answer to its next report."""
    clock = FakeClock()
    found, now = desk(clock)
    silent = [{**SAID, "since_ns": now - 50 * S, "limit_ns": 600 * S}]
    report = GatewayReport(source="a", silent=silent, replicas={"chat": 1})
    for steps in range(40):
        found.heard(report)
        told = found.silence("chat", 1, lambda steps=steps: board(2, steps))
        clock.advance(0.1)
    assert told is not None
    assert told.others_ns > told.since_ns
    assert found.heard(report) == ["chat"]
    assert found.silence("chat", 2, lambda: board(2, 99)) is None
    clock.advance(11)
    assert found.heard(report) == []


def test_lost_requests_are_told_once_each():
    """By their count, and not again when a gateway is heard for the first time."""
    clock = FakeClock()
    found, _ = desk(clock)
    told: list[tuple[str, int]] = []
    found.lost = lambda *what: told.append(what)
    for lost in ({"chat": 7}, {"chat": 7}, {"chat": 9, "b": 1}):
        found.heard(GatewayReport(source="a", lost=lost))
    assert told == [("chat", 2), ("b", 1)]


def findings(silence: Silence, now: int):
    facts = EngineFacts("chat", 1, State.READY, ready_ns=1, silence=silence)
    seen = Snapshot(now_ns=now, engine=facts, image=None, processes={}, exits=(), host=HostFacts())
    return [f for f in evaluate(seen, now, Policy()) if f.rule is Rule.REQUEST_SILENT], seen


def test_the_time_of_a_silence_begins_when_the_engine_last_served_others():
    """An engine that serves is not accused; one that has served nobody for the limit is."""
    lost = Silence("ab", "first_token", 10 * S, 40 * S, 1, others_ns=95 * S)
    assert findings(lost, 100 * S)[0] == []
    (over,), seen = findings(lost, 140 * S)
    assert (over.elapsed_ns, over.limit_ns) == (45 * S, 40 * S)
    assert not moved(over, seen)
    later = findings(replace(lost, others_ns=139 * S), 140 * S)[1]
    assert moved(over, later)  # one more served between two looks withdraws it


@pytest.mark.slow
def test_the_gateway_ends_what_is_lost_and_keeps_waiting_for_what_is_not():
    """The supervisor says that others are served: 504 at the limit; it says nothing: it is told."""

    async def nothing(peer: Peer) -> None:
        await peer.gone()

    with running(nothing, first_token=0.6) as gateway:
        with gateway.connect() as sock:
            sock.sendall(post(CHAT, {"stream": True}))
            until(lambda: any(s.limit_s == 0.6 for s in gateway.silent), what="it is told")
            gateway.call(lambda: gateway.watch.told(["a"]))
            assert b"request_lost" in sock.recv(4096)
        assert gateway.call(lambda: dict(gateway.gateway.lost)) == {"a": 1}
        assert gateway.total("request_lost") == 1


def test_the_desk_knows_what_gateways_held_and_whom_they_told():
    """The count of a moment ago is not forgotten at the end; answers count once nothing is owed any more."""
    clock = FakeClock()
    found, _ = desk(clock)
    found.heard(GatewayReport(source="a", replicas={"chat": 3, "other": 1}))
    found.heard(GatewayReport(source="b", replicas={"chat": 1}))
    clock.advance(0.5)
    declared = clock.monotonic_ns()
    clock.advance(0.1)
    found.heard(GatewayReport(source="a", failures={"st-1": 2}))
    assert (found.holds("chat"), found.holds("other"), found.holds("nobody")) == (4, 1, 0)
    assert found.told("chat", "st-1", declared) == 0  # b has not spoken since
    found.heard(GatewayReport(source="b", failures={"st-1": 1}))
    assert found.told("chat", "st-1", declared) == 3
    assert found.told("chat", "st-2", declared) == 0
