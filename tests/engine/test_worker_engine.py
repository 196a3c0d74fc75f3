"""The scheduler's loop between a scripted api and a device that the test plays."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time

import pytest
import torch

from daemon_helpers import until
from heartbeat_helpers import attach, folder_in, look
from stallwatch.board.image import LaneClass, LaneImage
from stallwatch.board.reader import BoardReader
from stallwatch.heartbeat import Board
from stallwatch.watch.policy import DEFAULT_PHASE_LIMITS
from stallwatch_engine.output.answers import Failure, Output
from stallwatch_engine.schedule.limits import Limits
from stallwatch_engine.schedule.scheduler import Scheduler
from stallwatch_engine.wire import (
    Abort,
    Failed,
    PeerBroke,
    PeerBusy,
    PeerGone,
    Sampling,
    Stats,
    Submit,
    Tokens,
    WorkerEnd,
)
from stallwatch_engine.wire.worker_end import SEND_S
from stallwatch_engine.worker.engine import ApiEnded, Engine, StepFailed, Vocabulary
from stallwatch_engine.worker.serve import speaker

EOS = 7
LIMITS = Limits(max_seqs=2, token_budget=8, max_model_len=32, page_size=4, pages=16, max_waiting=2)


class Stage:
    """Answers each launched step with the next of `ids` for every sample, and keeps what the api hears."""

    def __init__(self, *, ids=(1,), failed=(), error=None) -> None:
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self.said: list = []
        self.plans: list = []
        self.gauge: list[int] = []
        self._ids, self._failed, self._error = list(ids), failed, error
        board = Board(None, "worker", 0, 0)
        self.engine = Engine(
            Scheduler(LIMITS),
            self.inbox,
            launch=self.launch,
            send=self.send,
            tokens=Vocabulary(100, frozenset({EOS})),
            lane=board.lane("scheduler"),
            gauge=self,
        )

    def pending(self, n: int) -> None:
        self.gauge.append(n)

    def send(self, message) -> None:
        self.said.append(message)
        ends = isinstance(message, Failed) or (isinstance(message, Tokens) and message.finish)
        if ends and self.gauge[-1:] in ([], [1]):
            self.inbox.put(ApiEnded(PeerGone("done")))

    def launch(self, plan) -> None:
        self.plans.append(plan)
        if self._error is not None:
            self.inbox.put(Failure(plan.step, self._error))
            return
        token = self._ids.pop(0) if len(self._ids) > 1 else self._ids[0]
        many = len(plan.samples)
        self.inbox.put(
            Output(
                plan.step,
                {
                    "ids": torch.full((many,), token, dtype=torch.int32),
                    "failed": torch.tensor([n in self._failed for n in range(many)]),
                },
            )
        )

    def run(self, *items) -> list:
        """What the api hears besides gauges."""
        for item in items:
            self.inbox.put(item)
        self.engine.run()
        return [each for each in self.said if not isinstance(each, Stats)]


def submit(number=1, prompt=(3, 4), max_tokens=3, seconds=60.0, **sampling) -> Submit:
    return Submit(
        id=number,
        prompt=list(prompt),
        sampling=Sampling(max_tokens=max_tokens, temperature=0.0, **sampling),
        deadline_ns=time.monotonic_ns() + int(seconds * 1e9),
    )


def test_a_request_gets_its_tokens_and_one_end():
    """One message a token, the last with the reason; the gauge rises and falls."""
    stage = Stage(ids=(11, 12, 13))
    said = stage.run(submit())
    assert [each.ids for each in said] == [[11], [12], [13]]
    assert [each.finish for each in said] == [None, None, "length"]
    assert stage.gauge[0] == 1


def test_an_end_token_stops_unless_ignored():
    """The end token is part of the answer and its last; asked to ignore it, the answer goes on."""
    assert [each.finish for each in Stage(ids=(EOS,)).run(submit())] == ["stop"]
    said = Stage(ids=(EOS,)).run(submit(ignore_eos=True))
    assert [each.finish for each in said] == [None, None, "length"]


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"prompt": range(30), "max_tokens": 30}, "too_long"),
        ({"seconds": -1.0}, "deadline"),
        ({"prompt": (3, 100)}, "internal"),
    ],
)
def test_what_cannot_be_computed_is_answered_at_once(request_, reason):
    """Too long, too late, or with a token that does not exist: no step, one answer."""
    stage = Stage()
    (said,) = stage.run(submit(**request_))  # its deadline counts from here
    assert (said.id, said.reason) == (1, reason)
    assert stage.plans == []


def test_logits_that_are_not_finite_end_their_request():
    """By its own message; nobody else hears of it."""
    (said,) = Stage(failed=(0,)).run(submit())
    assert (said.id, said.reason) == (1, "nan_logits")


def test_an_aborted_request_is_heard_of_no_more():
    """Not a token after the abort, though its steps run out."""
    stage = Stage()
    said = stage.run(submit(max_tokens=20), Abort(id=1), ApiEnded(PeerGone("end")))
    assert said == []


@pytest.mark.parametrize(
    ("error", "reason", "kind"),
    [
        (TimeoutError("too late"), "stalled", "DEVICE_WAIT"),
        (RuntimeError("broken"), "internal", None),
    ],
)
def test_a_failed_step_ends_everything_with_one_message(error, reason, kind):
    """The api hears it before the loop ends, with the cause in words."""
    stage = Stage(error=error)
    with pytest.raises(StepFailed, match=str(error)):
        stage.run(submit())
    (said,) = [each for each in stage.said if isinstance(each, Failed)]
    assert (said.id, said.reason, said.kind) == (None, reason, kind)
    assert str(error) in said.message


@pytest.mark.parametrize("reason", [PeerBroke("nonsense"), PeerBusy("asleep")])
def test_an_api_that_breaks_the_rules_is_no_good_end(reason):
    """Only the end of file ends the worker in good order."""
    with pytest.raises(type(reason)):
        Stage().run(ApiEnded(reason))


def test_more_than_may_wait_are_told_to_come_back():
    """The third of two that may wait: overload, for that one alone."""
    stage = Stage()
    for number in range(1, 4):
        stage.inbox.put(submit(number, prompt=range(1, 9)))
    stage.inbox.put(ApiEnded(PeerGone("end")))
    stage.engine.run()
    refused = [each for each in stage.said if isinstance(each, Failed)]
    assert [(each.id, each.reason) for each in refused] == [(3, "overload")]


def test_a_send_that_the_api_does_not_take_is_a_wait_for_its_loop(tmp_path):
    """On the board it is no work of the scheduler's: it names the api, and may last longer than the
    limit of the api's loop, which is late first. Once the api reads, everything arrives.
    """
    near, far = socket.socketpair()
    with folder_in(tmp_path) as folder, contextlib.closing(WorkerEnd(far)) as end, near:
        board, reader = attach(folder), BoardReader(folder.path)

        def talk() -> None:
            lane = board.lane("scheduler")
            lane.enter("retire_step")
            say = speaker(end, lane)
            for number in range(1, 2001):
                say(Tokens(id=number, ids=[1] * 50))

        def waits() -> LaneImage | None:
            lanes = look(reader).lanes
            return next((each for each in lanes if each.phase.name == "api_read"), None)

        thread = threading.Thread(target=talk)
        thread.start()
        lane = until(waits, what="it waits for the api")
        assert lane.phase.cls is LaneClass.WAIT
        assert lane.wait_on == "api:0/loop"
        assert DEFAULT_PHASE_LIMITS["loop"] < lane.phase.limit_ns < SEND_S * 1e9
        near.settimeout(0.1)
        deadline = time.monotonic() + 20
        while thread.is_alive() and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                near.recv(1 << 20)
        assert not thread.is_alive()
