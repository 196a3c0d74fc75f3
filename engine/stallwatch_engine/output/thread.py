"""The output thread: waits for each step's copy, no longer than allowed, and answers for it.

A wait that times out fails that step and no other; the thread lives on. Whether the engine does is the
receiver's to say.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from stallwatch.heartbeat import Lane
from stallwatch_engine.output.answers import Answer, Failure, Output
from stallwatch_engine.output.buffers import Landing
from stallwatch_engine.streams.bounded import check_timeout
from stallwatch_engine.streams.errors import OverContract
from stallwatch_engine.streams.pool import EventPool, Lease
from stallwatch_engine.streams.protocol import Event, Stream

log = logging.getLogger(__name__)

COPY_STREAM = "copy"  # lane of the copy stream


@dataclass(frozen=True, slots=True)
class _Job:
    landing: Landing
    copied: Lease


class OutputThread:
    """`deliver` gets exactly one Answer per step, in order, in this thread; what it raises is logged.

    `streams` are the model's and the copies'. `capacity` steps may be under way (max_concurrent_batches).
    `worker` is the address of this process.
    """

    def __init__(
        self,
        streams: tuple[Stream, Stream],
        make_event: Callable[[str], Event],
        deliver: Callable[[Answer], None],
        *,
        capacity: int,
        timeout_s: float,
        make_lane: Callable[[], Lane],
        pinned: bool = False,
        worker: str = "worker:0",
    ) -> None:
        self._model, self._copies = streams
        self._deliver = deliver
        self._timeout_s = check_timeout(timeout_s)
        self._make_lane = make_lane
        self._pinned = pinned
        self._copy_lane, self._supplier = f"{worker}/{COPY_STREAM}", f"{worker}/model"
        self._model_stream = f"{worker}/stream/model"
        self._capacity = capacity
        self._produced = make_event("produced")
        self._events = EventPool(lambda: make_event("output"), capacity)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open = 0
        self._closed = False
        self._overdue: list[tuple[Landing, Event]] = []  # copies that may still land
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    @property
    def overdue(self) -> int:
        """Outputs kept because their copy never completed."""
        return len(self._overdue)

    def put(self, seq: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors out behind everything enqueued on the model stream so far. Never blocks.

        Call it before anything is enqueued that overwrites them. OverContract for a step too many: then
        there is no answer, because there was no step.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("the output thread was closed")
            if self._open >= self._capacity:
                raise OverContract("outputs under way", self._capacity)
            copied = self._events.take()
            self._open += 1
        landing = Landing(seq, tensors, pinned=self._pinned)
        try:
            self._produced.record(self._model)
            self._produced.wait(self._copies, on=self._model_stream)
            self._copies.enqueue("copy_output", landing.copy)
            copied.event.record(self._copies)
        except BaseException:
            copied.abandon()
            with self._lock:
                self._open -= 1
            raise
        self._jobs.put(_Job(landing, copied))

    def close(self, timeout_s: float) -> None:
        """Answer for every step under way, then end. TimeoutError when it does not end."""
        check_timeout(timeout_s)
        with self._lock:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the output thread did not end within {timeout_s:g} s")

    def _run(self) -> None:
        lane = self._make_lane()
        while True:
            lane.idle(on=self._supplier)
            job = self._jobs.get()
            if job is None:
                lane.close()
                return
            lane.wait("output_copy", on=self._copy_lane, seq=job.landing.seq)
            answer = self._answer(job)
            lane.enter("deliver_output", seq=job.landing.seq)
            with self._lock:
                self._open -= 1
            try:
                self._deliver(answer)
            except Exception:
                log.exception("the receiver of step %d's answer raised", answer.seq)
            lane.progress(1)

    def _answer(self, job: _Job) -> Answer:
        self._forget_landed()
        landing, event = job.landing, job.copied.event
        operation = f"copying the output of step {landing.seq} to the host"
        try:
            event.synchronize(time.monotonic() + self._timeout_s, operation)
        except TimeoutError as error:
            self._overdue.append((landing, event))
            job.copied.abandon()
            return Failure(landing.seq, error)
        except Exception as error:  # the stream failed: nothing of it will land any more
            job.copied.abandon()
            return Failure(landing.seq, error)
        try:
            tensors = landing.take()
        except Exception as error:
            self._overdue.append((landing, event))
            job.copied.abandon()
            return Failure(landing.seq, error)
        job.copied.release()
        return Output(landing.seq, tensors)

    def _forget_landed(self) -> None:
        self._overdue = [pair for pair in self._overdue if not _landed(*pair)]


def _landed(landing: Landing, event: Event) -> bool:
    """Complete, and really there: an event that lied once is not believed alone."""
    try:
        if not event.query():
            return False
        landing.take()
    except Exception:
        return False
    return True
