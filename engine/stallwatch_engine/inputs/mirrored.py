"""MRV1: the host owns copies of ids and offsets, so there is nothing to wait for.

One step at a time: its inputs need the tokens of the step before on the host, so nothing runs ahead.
"""

from __future__ import annotations

from collections.abc import Callable

from stallwatch.heartbeat import Lane
from stallwatch_engine.inputs.request_thread import RequestThread
from stallwatch_engine.inputs.step import HostSlot, StepInputs
from stallwatch_engine.ple.protocol import PleBackend

CAPACITY = 1


class MirroredInputs:
    """The request thread copies the mirrors itself; the model stream is not involved."""

    def __init__(
        self, backend: PleBackend, *, make_lane: Callable[[], Lane], worker: str = "worker:0"
    ) -> None:
        self._slot = HostSlot(backend.shape)
        self._thread: RequestThread[StepInputs] = RequestThread(
            backend, self._copy, capacity=CAPACITY, make_lane=make_lane, worker=worker
        )

    @property
    def capacity(self) -> int:
        return CAPACITY

    def stage(self, inputs: StepInputs) -> None:
        if inputs.ids.device.type != "cpu":
            raise ValueError(f"mirrored inputs live on the host, not on {inputs.ids.device}")
        self._thread.reserve()
        self._thread.put(inputs)

    def close(self, timeout_s: float) -> None:
        self._thread.close(timeout_s)

    def _copy(self, inputs: StepInputs, lane: Lane) -> StepInputs:
        lane.enter("copy_mirrors", seq=inputs.seq, tokens=inputs.ids.shape[0])
        self._slot.fill(inputs)
        return self._slot.view(inputs.seq, inputs.ids.shape[0], inputs.context.shape[0])
