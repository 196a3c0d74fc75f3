"""The old mode, for tests: one event for all requests, a copy stream, a queue of one. It deadlocks.

With the host a step ahead, the next step's record replaces what this request is about to wait for. The
copy stream then waits for a point behind the forward's own wait for rows that only this copy can bring.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from stallwatch.heartbeat import Lane
from stallwatch_engine.faults import Faults, FaultsRefused
from stallwatch_engine.inputs.request_thread import RequestThread
from stallwatch_engine.inputs.staged import MODEL_STREAM
from stallwatch_engine.inputs.step import HostSlot, StepInputs
from stallwatch_engine.ple.protocol import PleBackend
from stallwatch_engine.streams.bounded import check_timeout
from stallwatch_engine.streams.protocol import Event, Stream

FAULT = "inputs.shared_event"


class SharedEventInputs:
    """`gate`, where given, holds the request thread back until the host is ahead: a late thread, on demand."""

    def __init__(
        self,
        backend: PleBackend,
        streams: tuple[Stream, Stream],
        make_event: Callable[[], Event],
        *,
        faults: Faults,
        timeout_s: float,
        make_lane: Callable[[], Lane],
        gate: Callable[[int], object] = int,
    ) -> None:
        if faults.hit(FAULT) is None:
            raise FaultsRefused(
                f"one event for all input copies deadlocks: only the fault {FAULT} has it"
            )
        self._model, self._copies = streams
        self._ready, self._copied = make_event(), make_event()
        self._timeout_s = check_timeout(timeout_s)
        self._gate = gate
        self._slot = HostSlot(backend.shape)
        self._thread: RequestThread[StepInputs] = RequestThread(
            backend, self._copy, capacity=2, make_lane=make_lane, worker="worker:0"
        )

    @property
    def capacity(self) -> int:
        return self._thread.capacity

    def stage(self, inputs: StepInputs) -> None:
        self._thread.reserve()
        self._ready.record(self._model)
        self._thread.put(inputs)

    def close(self, timeout_s: float) -> None:
        self._thread.close(timeout_s)

    def _copy(self, inputs: StepInputs, lane: Lane) -> StepInputs:
        self._gate(inputs.seq)
        lane.wait("inputs_copied", on=f"worker:0/{MODEL_STREAM}", seq=inputs.seq)
        self._ready.wait(self._copies)  # binds to the latest record: perhaps the next step's
        self._copies.enqueue("copy_inputs", lambda: self._slot.fill(inputs))
        self._copied.record(self._copies)
        operation = f"copying the inputs of step {inputs.seq} to the host"
        self._copied.synchronize(time.monotonic() + self._timeout_s, operation)
        return self._slot.view(inputs.seq, inputs.ids.shape[0], inputs.context.shape[0])
