"""Every step ends in exactly one answer, whatever its copy does."""

from __future__ import annotations

import queue
import threading
import time

import pytest
import torch

from stallwatch.heartbeat import Board
from stallwatch_engine.faults import Fault, Faults
from stallwatch_engine.output.answers import Failure, Output, StaleOutput
from stallwatch_engine.output.thread import OutputThread
from stallwatch_engine.streams.errors import OverContract, StreamFailed
from stallwatch_engine.streams.threaded import ThreadedEvent, ThreadedStream

SOON_S = 10.0


class Rig:
    """A model stream, a copy stream and an output thread that delivers into a queue."""

    def __init__(
        self, *, faults: Faults | None = None, capacity=2, timeout_s=5.0, deliver=None
    ) -> None:
        self.model, self.copies = ThreadedStream("model"), ThreadedStream("copy")
        self.answers: queue.SimpleQueue = queue.SimpleQueue()
        self.out = OutputThread(
            (self.model, self.copies),
            lambda name: ThreadedEvent(name, faults=faults),
            deliver or self.answers.put,
            capacity=capacity,
            timeout_s=timeout_s,
            make_lane=lambda: Board(None, "worker", 0, 0).lane("output"),
        )

    def next(self):
        return self.answers.get(timeout=SOON_S)

    def end(self) -> None:
        for stream in (self.model, self.copies):
            stream.abort()
        self.out.close(SOON_S)
        for stream in (self.model, self.copies):
            stream.close(SOON_S)


@pytest.fixture
def rig():
    made = []

    def make(**options):
        made.append(Rig(**options))
        return made[-1]

    yield make
    for each in made:
        each.end()


def test_outputs_arrive_in_order_with_the_bits_that_the_model_stream_produced(rig):
    """The copy waits for the model stream, although the host has long enqueued more."""
    one = rig(capacity=50)
    for seq in range(50):
        ids = torch.full((4,), -1)
        one.model.enqueue("sample", lambda ids=ids, seq=seq: ids.fill_(seq))
        one.out.put(seq, {"ids": ids, "logprobs": ids.float()})
        one.model.enqueue("sync", lambda: None)
    for seq in range(50):
        answer = one.next()
        assert isinstance(answer, Output)
        assert (answer.seq, answer.tensors["ids"].tolist()) == (seq, [seq] * 4)


def test_an_event_that_never_completes_fails_its_step_by_name_and_on_time(rig):
    """TimeoutError naming the operation within T + 50 ms; the buffers are kept, the thread lives on."""
    faults = Faults((Fault("event.never", "output"),))
    one = rig(faults=faults, timeout_s=0.1)
    began = time.monotonic()
    one.out.put(7, {"ids": torch.zeros(4)})
    answer = one.next()
    took = time.monotonic() - began
    assert isinstance(answer, Failure)
    assert isinstance(answer.error, TimeoutError)
    assert "copying the output of step 7" in str(answer.error)
    assert 0.1 <= took < 0.1 + max(0.05, 10 * _latency())
    assert one.out.overdue == 1
    one.out.put(8, {"ids": torch.zeros(4)})
    assert one.next().seq == 8


def _latency() -> float:
    """How late a thread of this host wakes up now: a loaded host is not the code's fault."""
    late = []
    for _ in range(5):
        began = time.monotonic()
        threading.Event().wait(0.005)
        late.append(time.monotonic() - began - 0.005)
    return max(late)


def test_the_thread_lives_on_after_a_timeout_and_serves_later_steps(rig):
    """A copy that lands late is an explicit failure of that step alone; its buffers go when it has landed."""
    gate = threading.Event()
    one = rig(timeout_s=0.2)
    one.copies.enqueue("stuck", lambda: gate.wait(SOON_S))
    one.out.put(0, {"ids": torch.zeros(4)})
    assert isinstance(one.next().error, TimeoutError)
    assert one.out.overdue == 1
    gate.set()
    for seq in range(1, 40):
        one.out.put(seq, {"ids": torch.full((4,), seq)})
        answer = one.next()
        assert isinstance(answer, Output), answer
        assert answer.tensors["ids"][0] == seq
    assert one.out.overdue == 0


def test_a_late_event_still_gives_the_right_bits(rig):
    """Late is not never."""
    one = rig(faults=Faults((Fault("event.late", "output", 60.0),)))
    one.out.put(0, {"ids": torch.arange(4)})
    assert one.next().tensors["ids"].tolist() == [0, 1, 2, 3]


def test_an_event_that_completes_too_early_never_hands_out_what_has_not_landed(rig):
    """The stamp is copied last: without it the buffers of another time would pass as an output."""
    gate = threading.Event()
    one = rig(faults=Faults((Fault("event.wrong", "output"),)))
    one.copies.enqueue("slow", lambda: gate.wait(SOON_S))
    one.out.put(3, {"ids": torch.zeros(4)})
    answer = one.next()
    gate.set()
    assert isinstance(answer, Failure)
    assert isinstance(answer.error, StaleOutput)


def test_a_failed_stream_is_a_failure_at_once(rig):
    """Nothing of it will land: waiting for the timeout would only cost time."""
    one = rig(timeout_s=60.0)
    one.model.enqueue("explode", lambda: 1 / 0)
    try:
        one.out.put(0, {"ids": torch.zeros(4)})
    except StreamFailed:
        return  # already known: then there was no step
    answer = one.next()
    assert isinstance(answer, Failure)
    assert isinstance(answer.error, StreamFailed)


def test_one_output_too_many_raises_and_does_not_block(rig):
    """The contract is max_concurrent_batches."""
    gate = threading.Event()
    one = rig(capacity=2)
    one.model.enqueue("slow", lambda: gate.wait(SOON_S))
    one.out.put(0, {"ids": torch.zeros(1)})
    one.out.put(1, {"ids": torch.zeros(1)})
    with pytest.raises(OverContract, match="2 at a time"):
        one.out.put(2, {"ids": torch.zeros(1)})
    gate.set()
    assert [one.next().seq, one.next().seq] == [0, 1]


def test_a_receiver_that_raises_does_not_cost_the_next_step_its_answer(rig):
    """The thread belongs to all requests."""
    seen = []

    def deliver(answer):
        seen.append(answer.seq)
        if answer.seq == 0:
            raise RuntimeError("the receiver's own fault")

    one = rig(deliver=deliver)
    one.out.put(0, {"ids": torch.zeros(1)})
    one.out.put(1, {"ids": torch.zeros(1)})
    one.out.close(SOON_S)
    assert seen == [0, 1]


def test_close_answers_for_every_step_under_way(rig):
    """A request whose engine closes gets an answer too, and later steps are refused."""
    one = rig(capacity=3, timeout_s=0.05, faults=Faults((Fault("event.never", "output"),)))
    for seq in range(3):
        one.out.put(seq, {"ids": torch.zeros(1)})
    one.out.close(SOON_S)
    assert [one.next().seq for _ in range(3)] == [0, 1, 2]
    with pytest.raises(RuntimeError, match="closed"):
        one.out.put(3, {"ids": torch.zeros(1)})
