"""Streams on a CPU have the order of an accelerator's, and its way of failing."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallwatch_engine.faults import Fault, Faults
from stallwatch_engine.streams import threaded
from stallwatch_engine.streams.errors import NotRecorded, OverContract, StreamClosed, StreamFailed
from stallwatch_engine.streams.threaded import ThreadedEvent, ThreadedStream

SOON_S = 10.0


def soon() -> float:
    return time.monotonic() + SOON_S


@pytest.fixture
def stream():
    made = []

    def make(name="s", **options):
        made.append(ThreadedStream(name, **options))
        return made[-1]

    yield make
    for each in made:
        each.abort()
    for each in made:
        each.close(SOON_S)


def test_work_runs_in_the_order_of_its_enqueueing(stream):
    """A stream is first in, first out, and synchronize waits for all of it."""
    one, done = stream(), []
    for n in range(200):
        one.enqueue("append", lambda n=n: done.append(n))
    one.synchronize(soon())
    assert done == list(range(200))


@pytest.mark.parametrize("ask", ["query", "synchronize", "wait"])
def test_an_event_that_was_never_recorded_is_an_error(stream, ask):
    """torch would call it complete, and a forgotten record would look like success."""
    event = ThreadedEvent("inputs")
    calls = {
        "query": event.query,
        "synchronize": lambda: event.synchronize(soon(), "the copy"),
        "wait": lambda: event.wait(stream()),
    }
    with pytest.raises(NotRecorded, match="inputs was never recorded"):
        calls[ask]()


def test_a_wait_binds_to_the_record_that_is_the_latest_at_the_call(stream):
    """Recording again moves the event, and no wait that was made before."""
    first, second = stream("first"), stream("second")
    gate, done = threading.Event(), []
    event = ThreadedEvent()
    event.record(first)
    event.wait(second)
    second.enqueue("early", lambda: done.append("early"))
    first.enqueue("gate", lambda: gate.wait(SOON_S))
    event.record(first)  # behind the gate: the wait above must not care
    second.synchronize(soon())
    event.wait(second)
    second.enqueue("late", lambda: done.append("late"))
    with pytest.raises(TimeoutError):
        second.synchronize(time.monotonic() + 0.05)
    assert done == ["early"]
    gate.set()
    second.synchronize(soon())
    assert done == ["early", "late"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["work", "record", "wait"]), st.integers(0, 2), st.integers(0, 1)
        ),
        max_size=40,
    )
)
def test_any_program_of_records_and_waits_runs_as_it_was_written(program):
    """A waiter sees everything that was enqueued before the record its wait was bound to."""
    streams = [ThreadedStream(f"s{n}") for n in range(3)]
    events = [ThreadedEvent(f"e{n}") for n in range(2)]
    ran = [0, 0, 0]  # work items done, by stream
    given_ = [0, 0, 0]
    bound: list[tuple[int, int] | None] = [None, None]  # of each event: stream, items before it
    broken = []
    try:
        for what, s, e in program:
            if what == "work":
                given_[s] += 1
                streams[s].enqueue("work", lambda s=s: ran.__setitem__(s, ran[s] + 1))
            elif what == "record":
                events[e].record(streams[s])
                bound[e] = (s, given_[s])
            elif bound[e] is None:
                with pytest.raises(NotRecorded):
                    events[e].wait(streams[s])
            else:
                events[e].wait(streams[s])
                of, items = bound[e]

                def check(of=of, items=items):
                    if ran[of] < items:
                        broken.append((of, items, ran[of]))

                streams[s].enqueue("check", check)
        for each in streams:
            each.synchronize(soon())
        assert not broken
        assert ran == given_
    finally:
        for each in streams:
            each.close(SOON_S)


def test_failed_work_poisons_its_stream_and_whoever_waits_for_it(stream):
    """Nothing after it runs; events, waiting streams and the next enqueue all say what failed."""
    first, second = stream("first"), stream("second")
    done = []
    gate = threading.Event()
    first.enqueue("gate", lambda: gate.wait(SOON_S))
    first.enqueue("divide", lambda: 1 / 0)
    first.enqueue("after", lambda: done.append("after"))
    event = ThreadedEvent()
    event.record(first)
    event.wait(second)
    second.enqueue("dependent", lambda: done.append("dependent"))
    gate.set()
    for asked in (
        lambda: event.synchronize(soon(), "the copy"),
        event.query,
        lambda: first.synchronize(soon()),
        lambda: second.synchronize(soon()),
    ):
        with pytest.raises(StreamFailed, match="divide failed: division by zero"):
            asked()
    with pytest.raises(StreamFailed):
        first.enqueue("more", lambda: None)
    assert done == []


def test_close_ends_the_thread_or_names_what_does_not_end(stream):
    """A join has a deadline, and its error says where the stream stands."""
    gate = threading.Event()
    one = stream("model")
    one.enqueue("ple_wait", lambda: gate.wait(SOON_S))
    with pytest.raises(TimeoutError, match=r"stream model .* ple_wait"):
        one.close(0.05)
    gate.set()
    one.close(SOON_S)
    with pytest.raises(StreamClosed):
        one.enqueue("more", lambda: None)


def test_abort_frees_a_stream_that_waits_for_an_event_that_never_comes(stream):
    """What waits for an aborted stream fails, so that no thread is left."""
    first, second = stream("first"), stream("second")
    never = ThreadedEvent("e", faults=Faults((Fault("event.never"),)))
    never.record(first)
    never.wait(second)
    after = ThreadedEvent("after")
    after.record(second)
    second.abort()
    with pytest.raises(StreamFailed):
        after.synchronize(soon(), "the end")


def test_a_wait_on_a_stream_has_a_limit(stream):
    """An event that never completes fails the waiting stream by name instead of holding it for ever."""
    first, second = stream("first"), stream("second", wait_limit_s=0.2)
    never = ThreadedEvent("e", faults=Faults((Fault("event.never"),)))
    never.record(first)
    never.wait(second)
    with pytest.raises(StreamFailed, match="wait_event failed: the event did not complete"):
        second.synchronize(soon())


@pytest.mark.parametrize("how", ["never", "late", "wrong"])
def test_the_event_faults_do_what_they_say(stream, how):
    """never: not complete when the work is; late: complete after it; wrong: complete before it."""
    one, gate = stream(), threading.Event()
    faults = Faults((Fault(f"event.{how}", "inputs", 80.0),))
    event, honest = ThreadedEvent("inputs", faults=faults), ThreadedEvent("other", faults=faults)
    one.enqueue("gate", lambda: gate.wait(SOON_S))
    event.record(one)
    honest.record(one)
    early = event.query()
    gate.set()
    honest.synchronize(soon(), "the honest one")
    after = event.query()
    if how == "late":
        event.synchronize(soon(), "the late one")
    assert (early, after) == {
        "never": (False, False),
        "late": (False, False),
        "wrong": (True, True),
    }[how]


def test_a_host_that_never_waits_is_stopped(stream, monkeypatch):
    """No queue is unbounded: the operation too many raises at once."""
    monkeypatch.setattr(threaded, "MAX_ITEMS", 3)
    one, gate, began = stream(), threading.Event(), threading.Event()
    one.enqueue("gate", lambda: (began.set(), gate.wait(SOON_S)))
    assert began.wait(SOON_S)
    for _ in range(3):
        one.enqueue("work", lambda: None)
    with pytest.raises(OverContract, match="operations enqueued on stream"):
        one.enqueue("work", lambda: None)
    gate.set()


def test_an_observer_sees_what_the_stream_stands_at_and_for_whom(stream):
    """The seam for a heartbeat channel: operation and wait target before the work, idle after it."""
    seen = []

    class Observer:
        def begin(self, operation, on):
            seen.append((operation, on))

        def idle(self):
            seen.append("idle")

    one = stream(observer=Observer())
    one.enqueue("ple_wait", lambda: None, on="offload:0/ple")
    one.synchronize(soon())
    assert ("ple_wait", "offload:0/ple") in seen
    assert seen[0] == "idle"
