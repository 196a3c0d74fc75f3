"""The judge: one engine's trouble stays its own, and the thread always turns."""

from __future__ import annotations

import threading
import time

import pytest

from stallwatch.clock import SystemClock
from stallwatch.errors import UnknownEngine
from stallwatch.lifecycle.states import State
from stallwatch.testing.clock import FakeClock
from stallwatch.testing.watched import FakeEngine, StillBoard
from stallwatch.watch.finding import Rule
from stallwatch.watch.judge import Judge, LookRefused
from stallwatch.watch.notice import Confirmed, JudgeFault, Notice
from stallwatch.watch.snapshot import EngineFacts, Exit, HostFacts


class Told:
    """A sink that keeps what it is told and wakes whoever waits for it."""

    def __init__(self) -> None:
        self.notices: list[tuple[str, Notice]] = []
        self.news = threading.Event()

    def __call__(self, name: str, notice: Notice) -> None:
        self.notices.append((name, notice))
        self.news.set()


class CalmHost:
    """No witness ever speaks."""

    def facts(self, now_ns: int, *, late_ns: int = 0) -> HostFacts:
        return HostFacts(late_ns=late_ns)


def dead(name: str) -> FakeEngine:
    gone = Exit(pid=999_999, start_ticks=1, at_ns=1, root=True, status=0)
    return FakeEngine(name, now=EngineFacts(name, 1, State.READY), ended=(gone,))


def test_a_failing_engine_is_told_and_the_others_go_on():
    """An exception in one engine's look becomes a JudgeFault; its neighbour is judged."""
    told = Told()
    judge = Judge(FakeClock(), told, host=CalmHost())
    judge.add(FakeEngine("bad", error=RuntimeError("boom")))
    judge.add(dead("good"))
    judge.turn()
    kinds = {name: type(notice) for name, notice in told.notices}
    assert kinds == {"bad": JudgeFault, "good": Confirmed}


def test_the_same_fault_is_told_once_a_minute():
    """Ten failing looks a second make no flood of events."""
    clock, told = FakeClock(), Told()
    judge = Judge(clock, told, host=CalmHost())
    judge.add(FakeEngine("bad", error=RuntimeError("boom")))
    for _ in range(700):
        judge.turn()
        clock.advance(0.1)
    assert len(told.notices) == 2


def test_a_board_that_raises_leaves_the_processes_judged():
    """What a worker wrote may break the reader, never the judging of its processes."""
    told = Told()
    engine = dead("chat")
    engine.reader = StillBoard(error=ValueError("hostile"))
    judge = Judge(FakeClock(), told, host=CalmHost())
    judge.add(engine)
    judge.turn()
    assert {type(n) for _, n in told.notices} == {JudgeFault, Confirmed}
    fault = next(n for _, n in told.notices if isinstance(n, JudgeFault))
    assert "hostile" in fault.text


def test_a_broken_sink_and_a_broken_hook_stop_nothing():
    """Whatever the daemon's ends do, the judge counts it and goes on."""
    judge = Judge(FakeClock(), lambda *_: 1 / 0, host=CalmHost())  # type: ignore[arg-type, return-value]
    judge.on_tick.append(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    judge.add(dead("chat"))
    judge.turn()
    judge.turn()
    assert judge.sink_faults == 3
    assert judge.looks == 2


def test_latest_is_the_last_look_and_none_for_strangers():
    """Operator views read the last snapshot without waiting."""
    judge = Judge(FakeClock(), Told(), host=CalmHost())
    judge.add(dead("chat"))
    assert judge.latest("chat") is None
    judge.turn()
    assert judge.latest("chat").engine.name == "chat"
    assert judge.latest("nobody") is None
    judge.remove("chat")
    assert judge.latest("chat") is None


def test_wall_clock_steps_change_nothing():
    """F5: an operator sets the clock back by an hour between two looks."""
    clock, told = FakeClock(), Told()
    judge = Judge(clock, told, host=CalmHost())
    judge.add(FakeEngine())
    judge.turn()
    clock.step_wall(-3600)
    clock.advance(0.1)
    judge.turn()
    assert told.notices == []
    assert judge.age_s() == 0.0


@pytest.fixture
def running():
    """(judge, told): a started judge on the real clock, stopped afterwards."""
    told = Told()
    judge = Judge(SystemClock(), told, period_s=0.02, host=CalmHost())
    judge.start()
    yield judge, told
    assert judge.stop(5)
    assert "stallwatch-judge" not in {t.name for t in threading.enumerate()}


def until(true, deadline_s: float = 5.0) -> bool:
    end = time.monotonic() + deadline_s
    while not true() and time.monotonic() < end:
        time.sleep(0.002)
    return true()


def test_the_thread_turns_calls_its_hooks_and_stops(running):
    """The absolute schedule keeps the pace, and age_s stays small."""
    judge, _ = running
    ticks: list[int] = []
    judge.on_tick.append(lambda: ticks.append(1))
    judge.add(FakeEngine())
    assert until(lambda: len(ticks) >= 5)
    assert judge.looks >= 4
    assert judge.age_s() < 2.0


def test_look_now_answers_another_thread(running):
    """The third look is taken by the judging thread at once, for whoever asks."""
    judge, _ = running
    judge.add(dead("chat"))
    snapshots = [judge.look_now("chat", {1}, timeout_s=5) for _ in range(20)]
    assert [s.now_ns for s in snapshots] == sorted({s.now_ns for s in snapshots})
    with pytest.raises(UnknownEngine):
        judge.look_now("nobody")


def test_look_now_has_a_deadline_and_says_so_when_nobody_judges():
    """Without a running thread, or with a stuck one, the caller is told and goes on."""
    judge = Judge(SystemClock(), Told(), period_s=0.02, host=CalmHost())
    judge.add(dead("chat"))
    with pytest.raises(LookRefused):
        judge.look_now("chat")
    hold, held = threading.Event(), threading.Event()

    def stuck() -> None:
        held.set()
        hold.wait(10)

    judge.on_tick.append(stuck)
    judge.start()
    try:
        assert held.wait(5)
        with pytest.raises(LookRefused):
            judge.look_now("chat", timeout_s=0.05)
    finally:
        hold.set()
        assert judge.stop(5)


def test_a_failing_look_now_raises_in_its_caller_only(running):
    """The error of a requested look belongs to who asked; the thread lives."""
    judge, _ = running
    judge.add(FakeEngine("bad", error=RuntimeError("boom")))
    with pytest.raises(RuntimeError, match="boom"):
        judge.look_now("bad", timeout_s=5)
    assert judge.looks >= 0
    judge.add(dead("chat"))
    assert judge.look_now("chat", timeout_s=5).exits


def test_a_poke_finds_an_exit_before_the_next_round():
    """A reaped exit is judged at once, not up to a period later."""
    told = Told()
    judge = Judge(SystemClock(), told, period_s=30.0, host=CalmHost())
    engine = FakeEngine()
    judge.add(engine)
    judge.start()
    try:
        assert until(lambda: judge.looks >= 1)
        engine.ended = dead("chat").ended
        judge.poke()
        assert told.news.wait(5)
    finally:
        assert judge.stop(5)
    assert told.notices[0][1].finding.rule is Rule.PROCESS_GONE


def test_a_late_round_is_counted_and_missed_rounds_are_not_made_up(running):
    """After a stall of our own the schedule goes on from now: no burst of looks."""
    judge, _ = running
    judge.add(FakeEngine())
    once = iter([0.2])
    judge.on_tick.append(lambda: time.sleep(next(once, 0)))
    assert until(lambda: judge.late_looks >= 1)
    assert judge.looks < 10 * judge.late_looks + 100


def test_a_withdrawn_finding_is_told_again():
    """The runner says that a case led to nothing: the same stretch is confirmed once more, later."""
    clock, told = FakeClock(), Told()
    judge = Judge(clock, told, host=CalmHost())
    judge.add(dead("good"))
    judge.turn()
    (_, notice) = told.notices[0]
    judge.turn()
    assert len(told.notices) == 1
    judge.rearm("good", notice.finding.key)
    judge.rearm("nobody", notice.finding.key)
    judge.turn()
    assert [type(n) for _, n in told.notices] == [Confirmed, Confirmed]


def test_a_second_look_that_comes_late_is_a_late_look():
    """The thread was not run for a second between the two looks: that second is nobody else's fault."""

    class Host(CalmHost):
        def __init__(self) -> None:
            self.late: list[int] = []

        def facts(self, now_ns: int, *, late_ns: int = 0) -> HostFacts:
            self.late.append(late_ns)
            return super().facts(now_ns, late_ns=late_ns)

    clock, host = FakeClock(), Host()
    judge = Judge(clock, Told(), host=host)
    judge.add(FakeEngine())
    judge.turn()
    (watch,) = judge._watches.values()
    watch.again_ns = clock.monotonic_ns() + 50_000_000
    clock.advance(1.05)
    judge._second_looks()
    assert host.late == [0, 1_000_000_000]
