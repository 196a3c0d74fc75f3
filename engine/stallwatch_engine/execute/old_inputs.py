"""The old input mode in a whole engine, for tests: it deadlocks as soon as the host is a step ahead."""

from __future__ import annotations

import threading
from collections.abc import Callable

from stallwatch.heartbeat import Lane
from stallwatch_engine.execute.streams import Streams
from stallwatch_engine.faults import Faults
from stallwatch_engine.inputs.shared_event import FAULT as SHARED_EVENT
from stallwatch_engine.inputs.shared_event import SharedEventInputs
from stallwatch_engine.inputs.step import StepInputs
from stallwatch_engine.ple.protocol import PleBackend
from stallwatch_engine.streams.threaded import ThreadedStream

__all__ = ["SHARED_EVENT", "old_inputs"]


def old_inputs(
    backend: PleBackend,
    streams: Streams,
    *,
    faults: Faults,
    timeout_s: float,
    make_lane: Callable[[], Lane],
) -> SharedEventInputs:
    """One event for all steps and a copy stream of its own. FaultsRefused without the fault.

    The request thread is held back until the host is ahead, at most as long as a copy may take: what
    happened once in many runs then happens in each.
    """
    return _Late(
        backend,
        streams,
        faults=faults,
        timeout_s=timeout_s,
        make_lane=make_lane,
    )


class _Late(SharedEventInputs):
    def __init__(
        self,
        backend: PleBackend,
        streams: Streams,
        *,
        faults: Faults,
        timeout_s: float,
        make_lane: Callable[[], Lane],
    ) -> None:
        self._moved = threading.Condition()
        self._newest = -1
        self._patience_s = min(timeout_s, 0.2)
        super().__init__(
            backend,
            (streams.model, ThreadedStream("d2h")),
            lambda: streams.make_event("inputs"),
            faults=faults,
            timeout_s=timeout_s,
            make_lane=make_lane,
            gate=self._until_ahead,
        )

    def stage(self, inputs: StepInputs) -> None:
        super().stage(inputs)
        with self._moved:
            self._newest = inputs.seq
            self._moved.notify_all()

    def _until_ahead(self, seq: int) -> None:
        with self._moved:
            self._moved.wait_for(lambda: self._newest > seq, self._patience_s)
