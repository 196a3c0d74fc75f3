"""Stories of looks: what is told, when, and how often. Looks come every 100 ms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest

from stallwatch.board.image import LaneClass
from stallwatch.lifecycle.states import State
from stallwatch.testing.snapshots import (
    T0,
    engine,
    facts,
    frame,
    lane,
    lease,
    ns,
    process,
    snapshot,
)
from stallwatch.watch.finding import Rule
from stallwatch.watch.memory import Memory, remember
from stallwatch.watch.notice import Confirmed, Debugged, Extended, Notice, Warned
from stallwatch.watch.policy import Policy
from stallwatch.watch.rules import evaluate
from stallwatch.watch.snapshot import Exit, HostFacts, Recall, Snapshot
from stallwatch.watch.tracker import MAX_STRETCHES, Stretch, Tracker, moved, observe, rearmed

POLICY = Policy(default_ns=ns(10), compile_steps=0)


@dataclass
class Story:
    """Feeds looks through memory, rules and tracker, as the judge does."""

    policy: Policy = POLICY
    memory: Memory = field(default_factory=Memory)
    tracker: Tracker = field(default_factory=Tracker)
    told: list[tuple[float, Notice]] = field(default_factory=list)

    def look(self, raw: Snapshot) -> Snapshot:
        self.memory, snap = remember(self.memory, replace(raw, recall=Recall()), self.policy)
        found = evaluate(snap, snap.now_ns, self.policy)
        self.tracker, notices = observe(self.tracker, found, snap, self.policy)
        self.told += [(snap.now_ns / 1e9 - T0, n) for n in notices]
        return snap

    def run(self, until: float, make: Callable[[float], Snapshot], start: float = 0.0) -> None:
        for at in steps(start, until):
            self.look(make(T0 + at))

    def of(self, kind: type) -> list[tuple[float, Notice]]:
        return [(at, n) for at, n in self.told if isinstance(n, kind)]

    def confirmed(self) -> list[float]:
        return [round(at, 2) for at, _ in self.of(Confirmed)]


def steps(start: float, until: float) -> Iterator[float]:
    for i in range(round(start * 10), round(until * 10) + 1):
        yield i / 10


def stuck(at: float, **fields) -> Snapshot:
    return snapshot(at, [lane("model", frame(at=T0))], **fields)


def test_what_was_withdrawn_is_told_again_after_a_rest_that_doubles():
    """A third look that saw a twitch is not the last word; nor are stacks taken without a pause."""
    story = Story()
    story.run(11, stuck)
    (_, notice) = story.of(Confirmed)[0]
    for at in (11, 15):
        story.tracker = rearmed(story.tracker, notice.finding.key, ns(T0 + at))
        story.run(at + 4, stuck, start=at + 0.1)
    assert story.confirmed() == [10.1, 12.1, 17.1]


def test_warned_once_and_confirmed_once_by_the_second_look():
    """One warning at half the limit, one confirmation at most 250 ms after it, no repetition."""
    story = Story()
    story.run(30, stuck)
    assert [round(at, 1) for at, _ in story.of(Warned)] == [5.0]
    assert story.confirmed() == [10.1]
    notice = story.of(Confirmed)[0][1]
    assert notice.before.now_ns == ns(T0 + 5)
    assert notice.finding.rule is Rule.PHASE_OVER_LIMIT


def test_one_look_is_not_enough():
    """A lane over its limit at one look that moves before the next is not confirmed."""
    story = Story()
    story.run(10, stuck)
    story.look(snapshot(T0 + 10.1, [lane("model", frame(at=T0 + 10.05), beats=2)]))
    assert story.confirmed() == []
    assert not story.tracker.stretches


def test_each_stretch_warns_anew_with_its_own_before():
    """Two slow phases one after the other are two warnings; deltas never span both."""
    story = Story()
    story.run(16, lambda at: snapshot(at, [lane("model", frame(at=T0 + (at - T0) // 8 * 8))]))
    assert [round(at, 1) for at, _ in story.of(Warned)] == [5.0, 13.0]
    story.run(20, lambda at: snapshot(at, [lane("model", frame(at=T0 + 8))]), start=16.1)
    assert story.of(Confirmed)[0][1].before.now_ns == ns(T0 + 16.1)


def test_a_gap_in_the_looks_does_not_join_two_stretches():
    """The lane moved while nobody looked: that is a new stretch, although both looks found it late."""
    story = Story()
    story.look(stuck(T0 + 6))
    story.look(snapshot(T0 + 16, [lane("model", frame(at=T0 + 9))]))
    assert len(story.of(Warned)) == 2


def test_two_looks_a_millisecond_apart_are_one():
    """A poke right after a look must not confirm: the process had no chance to move."""
    story = Story()
    story.run(10, stuck)
    story.look(stuck(T0 + 10.001))
    assert story.confirmed() == []
    story.look(stuck(T0 + 10.05))
    assert story.confirmed() == [10.05]


def test_beats_that_move_withhold_the_confirmation():
    """What moves between two looks is not confirmed, over its limit or not."""
    story = Story()
    story.run(
        12, lambda at: snapshot(at, [lane("model", frame(at=T0), beats=round((at - T0) * 10))])
    )
    assert story.confirmed() == []


def test_an_expired_outer_phase_is_confirmed_under_a_busy_inner_one():
    """Trap 5: the inner phase's beats do not keep the outer one unconfirmed for ever."""

    def busy(at: float) -> Snapshot:
        stack = (frame("request", at=T0, limit=10), frame("step", at=at - 0.01))
        return snapshot(at, [lane("model", *stack, beats=int(at * 100), work=int(at * 100))])

    story = Story()
    story.run(11, busy)
    assert story.confirmed() == [10.1]


def test_idle_time_never_counts_into_a_later_stretch():
    """Trap 1 (SGLang): 9 s idle and then a legal work item of 2 s under a limit of 4 s is fine."""
    policy = replace(POLICY, default_ns=ns(4))

    def look(at: float) -> Snapshot:
        t = at - T0
        idle = frame("idle", LaneClass.IDLE, at=T0)
        return snapshot(at, [lane("model", idle if t < 9 else frame(at=T0 + 9))])

    story = Story(policy)
    story.run(11.0, look)
    assert story.confirmed() == []
    story.run(14, look, start=11.1)
    assert story.confirmed() == [13.1]


def test_idle_below_an_outer_phase_does_not_age_it():
    """F2: an outer phase whose lane waited for work within it resumes where it was."""

    def look(at: float) -> Snapshot:
        outer, t = frame("serve", at=T0, limit=10), at - T0
        stack = (outer, frame("idle", LaneClass.IDLE, at=T0 + 1)) if 1 <= t < 51 else (outer,)
        return snapshot(at, [lane("model", *stack)])

    story = Story()
    story.run(65, look)
    (at,) = story.confirmed()
    assert at == pytest.approx(60.2, abs=0.15)  # 10 s of its own, 50 s idle, on a grid of looks


def test_pending_without_progress_is_confirmed_and_idleness_before_it_is_not_counted():
    """The clock of pending work starts when work becomes pending, not at the last progress."""

    def look(at: float) -> Snapshot:
        loop = lane("loop", frame("loop", at=at), role="core", work=5, beats=int(at * 10))
        return snapshot(at, [loop], processes=[process("core", pending=int(at - T0 >= 50))])

    story = Story(replace(POLICY, no_progress_ns=ns(20)))
    story.run(75, look)
    assert story.confirmed() == [70.1]
    assert [round(at, 1) for at, _ in story.of(Warned)] == [60.0]


def test_work_that_moves_keeps_pending_work_from_being_a_stall():
    """F3: a saturated engine with a long queue that finishes one item a minute is not stalled."""

    def look(at: float) -> Snapshot:
        loop = lane("loop", frame("loop", at=at), role="core", work=int(at - T0) // 19)
        return snapshot(at, [loop], processes=[process("core", pending=951)])

    story = Story(replace(POLICY, no_progress_ns=ns(20)))
    story.run(200, look)
    assert story.confirmed() == []


# -- exits and stops ----------------------------------------------------------------------------


def test_an_exit_is_confirmed_at_its_first_look_once():
    """An exit cannot un-happen: no second look."""
    gone = Exit(pid=100, start_ticks=1, at_ns=ns(T0), root=True, signal=9)
    story = Story()
    story.run(1, lambda at: snapshot(at, procs=[], exits=(gone,), processes=[]), start=0.1)
    assert story.confirmed() == [0.1]


def test_a_missing_thread_needs_two_looks():
    """A lane that closes while its thread ends is read half-way at one look at most."""

    def look(at: float) -> Snapshot:
        one = lane("output", frame(at=T0), tid=105)
        return snapshot(at, [one], procs=[facts(100, tids=frozenset({100}))])

    story = Story()
    story.run(1, look)
    assert story.confirmed() == [0.1]


def test_a_stop_is_confirmed_within_a_second_and_only_after_half_a_one():
    """K23: two looks in state T at least 500 ms apart."""
    story = Story()
    story.run(0.9, lambda at: snapshot(at, procs=[facts(100, state="T")], processes=[process()]))
    assert story.confirmed() == [0.6]


def test_a_short_stop_is_nothing():
    """Stopped for 400 ms and continued: no verdict, also when it happens again."""

    def look(at: float) -> Snapshot:
        state = "T" if int((at - T0) * 10 + 0.5) % 10 < 5 else "S"
        return snapshot(at, procs=[facts(100, state=state)], processes=[process()])

    story = Story()
    story.run(10, look)
    assert story.confirmed() == []


# -- host witnesses -----------------------------------------------------------------------------


def test_a_late_look_after_a_suspension_extends_once():
    """F5: supervisor and engine stopped together for minutes: the engine gets one more limit."""
    story = Story()
    story.run(2, stuck)
    story.look(stuck(T0 + 600, host=HostFacts(late_ns=ns(597.9))))
    story.look(stuck(T0 + 600.1))
    assert story.confirmed() == []
    assert [(round(at), n.by_ns) for at, n in story.of(Extended)] == [(600, ns(10))]
    story.run(612, stuck, start=600.2)
    assert story.confirmed() == [610.1]
    assert len(story.of(Extended)) == 1


def test_a_small_lateness_buys_only_what_it_took():
    """A look that came 0.3 s late delays the verdict by 0.3 s, not by a limit."""
    story = Story()
    story.run(9.9, lambda at: stuck(at, host=HostFacts(late_ns=ns(0.3) if at == T0 + 7 else 0)))
    story.run(12, stuck, start=10.0)
    assert story.confirmed() == [10.4]


def test_the_report_says_which_limit_was_in_force_in_the_end():
    """The first look over the limit came 3 s after it and bought 3 s from then on: 16 s, not 13 s."""
    story = Story()
    story.run(9.9, stuck)
    story.look(stuck(T0 + 13, host=HostFacts(late_ns=ns(3))))
    story.run(18, stuck, start=13.1)
    assert story.confirmed() == [16.1]
    finding = story.of(Confirmed)[0][1].finding
    assert finding.limit_ns == ns(16)
    assert finding.elapsed_ns - finding.limit_ns == pytest.approx(ns(0.1), abs=ns(0.01))
    assert finding.notes == ("extended by 3.00 s: our own looks came 3.00 s late",)


def test_what_came_late_after_the_extension_is_said_too():
    """An extension is given once. Looks that stay late delay the verdict, and the report says by how much."""
    story = Story()
    story.run(9.9, stuck)
    story.look(stuck(T0 + 11, host=HostFacts(late_ns=ns(1))))
    story.look(stuck(T0 + 14, host=HostFacts(late_ns=ns(2.9))))
    story.look(stuck(T0 + 14.05))
    (at,) = story.confirmed()
    finding = story.of(Confirmed)[0][1].finding
    assert at == pytest.approx(14.05, abs=0.05)
    assert finding.limit_ns == ns(12)
    assert finding.notes[1] == "after that our own looks came 2.90 s late in all"
    assert finding.elapsed_ns <= finding.limit_ns + ns(2.9 + 0.25)


def test_lateness_within_a_period_is_no_witness():
    """Ordinary jitter of our own loop extends nothing."""
    story = Story()
    story.run(12, lambda at: stuck(at, host=HostFacts(late_ns=ns(0.09))))
    assert story.confirmed() == [10.1]
    assert story.of(Extended) == []


@pytest.mark.parametrize(
    ("host", "share"),
    [
        (lambda t: HostFacts(throttled_usec=int(t * 0.3e6)), "throttled 30%"),
        (lambda t: HostFacts(cpu_full_usec=int(t * 0.5e6)), "pressure (full) 50%"),
        (lambda t: HostFacts(frozen=t > 8), "frozen"),
    ],
)
def test_a_starved_host_extends_once_by_the_limit(host, share):
    """F5: throttling, pressure and a frozen cgroup buy one more limit, and the report says so."""
    story = Story()
    story.run(30, lambda at: stuck(at, host=host(at - T0)))
    (_, extended), *others = story.of(Extended)
    assert share in extended.witness
    assert others == []
    assert story.confirmed() == [20.1]
    finding = story.of(Confirmed)[0][1].finding
    assert finding.limit_ns == ns(20)
    assert any(share in note for note in finding.notes)


def test_little_throttling_is_no_witness():
    """Less than a fifth of the window extends nothing."""
    story = Story()
    story.run(12, lambda at: stuck(at, host=HostFacts(throttled_usec=int((at - T0) * 0.1e6))))
    assert story.confirmed() == [10.1]


def test_all_lanes_stopped_together_is_no_witness():
    """A dead device stops every lane too."""
    story = Story()
    story.run(
        11,
        lambda at: snapshot(at, [lane("m", frame(at=T0), rank=r, pid=100 + r) for r in range(8)]),
    )
    assert story.confirmed() == [10.1] * 8


# -- debugger, pause ----------------------------------------------------------------------------


def traced(at: float, since: float, until: float) -> Snapshot:
    inside = since <= at - T0 < until
    one = facts(100, state="t" if inside else "S", tracer_pid=7 if inside else 0)
    return stuck(at, procs=[replace(one, tids=frozenset({100}))])


def test_a_debugger_suspends_the_limits_and_its_time_is_not_counted():
    """F12: gdb for 60 s in a phase with a limit of 10 s is no stall; the rest of the 10 s counts."""
    story = Story()
    story.run(75, lambda at: traced(at, 4, 64))
    assert [round(at, 1) for at, _ in story.of(Debugged)] == [4.0]
    (at,) = story.confirmed()
    assert at == pytest.approx(70.2, abs=0.15)


def test_a_debugger_suspends_for_half_an_hour_at_most():
    """A forgotten debugger is no mute: after its time the limits run again, and that is told."""
    story = Story(replace(POLICY, debugger_ns=ns(30)))
    story.run(60, lambda at: traced(at, 4, 1000))
    assert [(round(at), n.expired) for at, n in story.of(Debugged)] == [(4, False), (34, True)]
    (at,) = story.confirmed()
    assert at == pytest.approx(40.2, abs=0.15)


def test_a_debugger_between_the_two_looks_withholds_the_confirmation():
    """F12: somebody attaches to the very process that has just been found over its limit."""
    story = Story()
    story.run(30, lambda at: traced(at, 10.05, 1000))
    assert story.confirmed() == []
    assert len(story.of(Debugged)) == 1


def test_an_exit_under_a_debugger_is_still_an_exit():
    """The debugger excuses slowness, not death."""
    gone = Exit(pid=101, start_ticks=1, at_ns=ns(T0), root=True, signal=9)
    story = Story()
    story.run(1, lambda at: replace(traced(at, 0, 9), exits=(gone,)))
    assert story.confirmed() == [0.0]


def test_time_under_a_lease_is_not_counted_afterwards():
    """F4: 120 s of weight update inside a phase with a limit of 10 s is not held against it."""

    def look(at: float) -> Snapshot:
        held = 2 <= at - T0 < 122
        pause = lease(at=T0 + 2, seconds=300) if held else None
        return stuck(at, processes=[process(pause=pause)])

    story = Story()
    story.run(140, look)
    (at,) = story.confirmed()
    assert at == pytest.approx(130.2, abs=0.15)


def test_pausing_again_and_again_mutes_nothing():
    """A trainer that pauses every 4 s for 2 s does not keep a dead lane unjudged."""

    def look(at: float) -> Snapshot:
        t = at - T0
        pause = lease(at=T0 + t - t % 4, seconds=3) if t % 4 < 2 else None
        return stuck(at, processes=[process(pause=pause)])

    story = Story()
    story.run(40, look)
    assert story.confirmed()
    assert 18 <= story.confirmed()[0] <= 24


# -- third look, bounds -------------------------------------------------------------------------


def confirmed_finding():
    story = Story()
    story.run(10.5, stuck)
    return story.of(Confirmed)[0][1].finding


def test_the_third_look_withdraws_what_moved():
    """After the first stacks: a beat, a new phase, a closed lane or a dead process withdraws."""
    finding = confirmed_finding()
    assert not moved(finding, stuck(T0 + 11))
    for other in (
        snapshot(T0 + 11, [lane("model", frame(at=T0), beats=2)]),
        snapshot(T0 + 11, [lane("model", frame(at=T0 + 10.9))]),
        snapshot(T0 + 11, [lane("model", frame(at=T0), closed=True)]),
        snapshot(T0 + 11, [lane("model", frame(at=T0))], moving=("worker:0/model",)),
        snapshot(T0 + 11, [lane("model", frame(at=T0))], procs=[]),
    ):
        assert moved(finding, other)


def test_an_unreadable_board_withdraws_nothing():
    """A board that vanished proves no progress."""
    assert not moved(confirmed_finding(), stuck(T0 + 11, image=None))


def test_what_was_withdrawn_can_be_confirmed_again():
    """A lane that moved once and then stands still for its limit is found again."""
    story = Story()
    story.run(10.5, stuck)
    story.run(25, lambda at: snapshot(at, [lane("model", frame(at=T0 + 11), beats=2)]), start=11)
    assert story.confirmed() == [10.1, 21.1]


def test_a_new_incarnation_starts_clean():
    """Nothing of the old incarnation's stretches or memory accuses the new one."""
    story = Story()
    story.run(10, stuck)
    story.look(stuck(T0 + 10.1, engine=engine(incarnation=2)))
    assert story.confirmed() == []


def test_a_stopping_engine_hangs_once():
    """SHUTDOWN_HANG is confirmed by two looks like the rest."""
    facts_ = engine(State.STOPPING, stop_asked_ns=ns(T0), stop_grace_ns=ns(5))
    story = Story()
    story.run(7, lambda at: stuck(at, engine=facts_))
    assert story.confirmed() == [5.1]


def test_a_hostile_board_cannot_fill_the_memory():
    """The number of stretches is bounded, and snapshots kept for deltas hold no thread lists."""
    lanes = [replace(lane("m", frame(at=T0)), slot=i, name=f"m{i}") for i in range(2000)]
    story = Story()
    story.run(10.2, lambda at: snapshot(at, lanes), start=9.9)
    assert len(story.tracker.stretches) <= MAX_STRETCHES
    kept: list[Stretch] = list(story.tracker.stretches.values())
    assert all(p.tids is None for s in kept for p in s.before.processes.values())
