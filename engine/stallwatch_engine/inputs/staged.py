"""MRV2: the inputs are copied to the host on the model stream, before the forward's wait for its rows.

Each request is bound to a completion event of its own, recorded right behind its copies. One shared event
was the defect that this replaces: the next step's record moved it behind this step's wait, and model
stream, PLE backend and request thread then waited for each other in silence.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from stallwatch.heartbeat import Lane
from stallwatch_engine.inputs.request_thread import RequestThread
from stallwatch_engine.inputs.step import HostSlot, StepInputs
from stallwatch_engine.ple.protocol import PleBackend
from stallwatch_engine.streams.bounded import check_timeout
from stallwatch_engine.streams.pool import EventPool, Lease
from stallwatch_engine.streams.protocol import Event, Stream

MODEL_STREAM = "stream/model"  # channel of the model stream


@dataclass(frozen=True, slots=True)
class _Request:
    seq: int
    tokens: int
    requests: int
    copied: Lease


class StagedInputs:
    """Up to `max_concurrent_batches` steps between stage() and submit. `timeout_s` bounds each copy."""

    def __init__(
        self,
        backend: PleBackend,
        stream: Stream,
        make_event: Callable[[], Event],
        *,
        max_concurrent_batches: int,
        timeout_s: float,
        make_lane: Callable[[], Lane],
        pinned: bool = False,
        worker: str = "worker:0",
    ) -> None:
        self._stream = stream
        self._model_stream = f"{worker}/{MODEL_STREAM}"
        self._timeout_s = check_timeout(timeout_s)
        self._slot = HostSlot(backend.shape, pinned=pinned)
        self._events = EventPool(make_event, max_concurrent_batches)
        self._thread: RequestThread[_Request] = RequestThread(
            backend,
            self._copied,
            capacity=max_concurrent_batches,
            make_lane=make_lane,
            worker=worker,
        )

    @property
    def capacity(self) -> int:
        return self._thread.capacity

    def stage(self, inputs: StepInputs) -> None:
        self._thread.reserve()  # before anything is enqueued: a refused step leaves no trace
        try:
            copied = self._events.take()
            self._stream.enqueue("copy_inputs", lambda: self._slot.fill(inputs))
            copied.event.record(self._stream)
        except BaseException:
            self._thread.cancel()
            raise
        tokens, requests = inputs.ids.shape[0], inputs.context.shape[0]
        self._thread.put(_Request(inputs.seq, tokens, requests, copied))

    def close(self, timeout_s: float) -> None:
        self._thread.close(timeout_s)

    def _copied(self, request: _Request, lane: Lane) -> StepInputs:
        lane.wait("inputs_copied", on=self._model_stream, seq=request.seq)
        operation = f"copying the inputs of step {request.seq} to the host"
        try:
            request.copied.event.synchronize(time.monotonic() + self._timeout_s, operation)
        except TimeoutError:
            request.copied.abandon()
            raise
        request.copied.release()
        return self._slot.view(request.seq, request.tokens, request.requests)
