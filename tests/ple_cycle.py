"""Model stream, request thread and PLE backend without a model: the harness of the input modes.

As a script it takes the board snapshot in tests/fixtures/ple_cycle: the three-way wait of the old input
mode, with a real offload process. `python tests/ple_cycle.py` (PYTHONPATH=supervisor:engine:kernels:tests).
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

import ple_tables
from heartbeat_helpers import attach, folder_in, look
from stallwatch.board.create import SHM
from stallwatch.board.image import BoardImage, LaneClass
from stallwatch.board.reader import BoardReader
from stallwatch.heartbeat import Board
from stallwatch_engine.faults import Fault, Faults
from stallwatch_engine.inputs.mirrored import MirroredInputs
from stallwatch_engine.inputs.shared_event import FAULT, SharedEventInputs
from stallwatch_engine.inputs.staged import StagedInputs
from stallwatch_engine.inputs.step import InputMode, StepInputs
from stallwatch_engine.ple.offload.client import OffloadBackend
from stallwatch_engine.ple.offload.process import OffloadProcess
from stallwatch_engine.ple.protocol import PleBackend
from stallwatch_engine.streams.observe import ChannelObserver
from stallwatch_engine.streams.threaded import ThreadedEvent, ThreadedStream

FIXTURE = Path(__file__).parent / "fixtures" / "ple_cycle"
CYCLE = {
    ("worker:0/stream/model", "offload:0/ple"),
    ("offload:0/ple", "worker:0/ple-request"),
    ("worker:0/ple-request", "worker:0/stream/model"),
}
PATIENCE_S = 60.0


class Harness:
    """A host that runs ahead by `ahead` steps. Rows of each step are cloned into `rows`."""

    def __init__(
        self, backend: PleBackend, board: Board, *, ahead: int = 2, bound_s: float = 20.0
    ) -> None:
        self.backend, self.bound_s, self.ahead = backend, bound_s, ahead
        self._board = board
        self._lanes = ExitStack()
        channel = board.channel("stream/model")
        self._lanes.callback(channel.close)
        self.model = ThreadedStream("model", observer=ChannelObserver(channel, "worker:0/model"))
        self.copies = ThreadedStream("d2h")
        shape = backend.shape
        self._device = [  # static buffers, as a device has them: each step overwrites the last
            torch.zeros(shape.max_tokens, dtype=torch.int32),
            torch.zeros(shape.max_requests + 1, dtype=torch.int32),
            torch.zeros(shape.max_requests, shape.ngram - 1, dtype=torch.int32),
        ]
        self._free = threading.Semaphore(ahead)
        self.staged = 0
        self._moved = threading.Condition()
        self.rows: dict[int, torch.Tensor] = {}

    def lane(self):
        return self._board.lane("ple-request")

    def staged_inputs(
        self, faults: Faults | None = None, timeout_s: float | None = None
    ) -> StagedInputs:
        return StagedInputs(
            self.backend,
            self.model,
            lambda: ThreadedEvent("inputs", faults=faults),
            max_concurrent_batches=self.ahead,
            timeout_s=timeout_s or self.bound_s,
            make_lane=self.lane,
        )

    def shared_inputs(self) -> SharedEventInputs:
        """The old mode, its request thread held back until the host is a step ahead."""
        return SharedEventInputs(
            self.backend,
            (self.model, self.copies),
            ThreadedEvent,
            faults=Faults((Fault(FAULT),)),
            timeout_s=self.bound_s,
            make_lane=self.lane,
            gate=self._until_ahead,
        )

    def mirrored_inputs(self) -> MirroredInputs:
        return MirroredInputs(self.backend, make_lane=self.lane)

    def run(
        self, mode: InputMode, steps: range, step: Callable[..., tuple] = ple_tables.step
    ) -> None:
        """Enqueue all steps; returns when the last is enqueued."""
        for seq in steps:
            if not self._free.acquire(timeout=self.bound_s * 2):
                self.model.check()
                raise TimeoutError(f"step {seq} got no room")
            self.model.check()
            inputs = step(seq)
            if isinstance(mode, MirroredInputs):
                mode.stage(StepInputs(seq, *inputs))
            else:
                self.model.enqueue("sample", lambda inputs=inputs: self._sample(inputs))
                mode.stage(StepInputs(seq, *self._views(inputs)))
            with self._moved:
                self.staged = seq + 1
                self._moved.notify_all()
            self.model.enqueue("ple_wait", lambda seq=seq: self._wait(seq), on="offload:0/ple")
            self.model.enqueue("forward", lambda seq=seq: self._forward(seq))

    def finish(self) -> None:
        self.model.synchronize(time.monotonic() + self.bound_s * 2)

    def close(self, mode: InputMode) -> None:
        """End all threads, whatever state they are in."""
        self.backend.fail(RuntimeError("the harness ends"))
        for stream in (self.model, self.copies):
            stream.abort()
        mode.close(PATIENCE_S)
        for stream in (self.model, self.copies):
            stream.close(PATIENCE_S)
        self._lanes.close()

    def _until_ahead(self, seq: int) -> None:
        with self._moved:
            self._moved.wait_for(lambda: self.staged > seq + 1, PATIENCE_S)

    def _views(self, inputs):
        ids, starts, context = self._device
        return ids[: len(inputs[0])], starts[: len(inputs[1])], context[: len(inputs[2])]

    def _sample(self, inputs) -> None:
        for target, source in zip(self._views(inputs), inputs, strict=True):
            target.copy_(source)

    def _wait(self, seq: int) -> None:
        self._got = self.backend.wait(seq, time.monotonic() + self.bound_s)

    def _forward(self, seq: int) -> None:
        self.rows[seq] = self._got.clone()
        self.backend.consumed(seq)
        self._got.fill_(torch.nan)  # a canary: whoever hands these rows out again is found out
        self._free.release()


def edges(image: BoardImage) -> set[tuple[str, str]]:
    """Who declares to wait for whom. An idle lane that names its supplier does not."""
    return {
        (lane.address, lane.wait_on)
        for lane in image.lanes
        if not lane.closed and lane.wait_on and lane.phase.cls is LaneClass.WAIT
    }


def until_cycle(reader: BoardReader, seconds: float = PATIENCE_S) -> set[tuple[str, str]]:
    """The edges once they are the circle and stand still, or the last ones seen."""
    deadline = time.monotonic() + seconds
    while True:
        found = edges(look(reader))
        if found == CYCLE or time.monotonic() > deadline:
            return found
        time.sleep(0.02)  # a poll with a deadline


def start_offload(tables, folder=None, **options) -> OffloadProcess:
    """An offload process with those tables in memory, on the board in `folder`."""
    before = dict(os.environ)
    os.environ.update(folder.environment() if folder else {})
    try:
        return OffloadProcess(
            "stallwatch_engine.ple.tables:open_resident", tables.describe(), **options
        )
    finally:
        os.environ.clear()
        os.environ.update(before)


def take_fixture(target: Path) -> None:
    """Stall on purpose, and keep the board as it then is."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = stack.enter_context(folder_in(SHM, lanes=8, processes=2))
        tables = ple_tables.spec(scratch)
        process = start_offload(tables, folder)
        stack.callback(process.close)
        board = attach(folder)
        stack.callback(board.close)
        backend = OffloadBackend(process, ple_tables.shape(tables))
        stack.callback(backend.close)
        backend.serving(time.monotonic() + PATIENCE_S)
        harness = Harness(backend, board, bound_s=PATIENCE_S)
        mode = harness.shared_inputs()
        stack.callback(harness.close, mode)
        harness.run(mode, range(2))
        reader = BoardReader(folder.path)
        stack.callback(reader.close)
        found = until_cycle(reader)
        if found != CYCLE:
            sys.exit(f"no cycle: {sorted(found)}")
        target.mkdir(parents=True, exist_ok=True)
        (target / "board").write_bytes(folder.file.read_bytes())


if __name__ == "__main__":
    torch.set_num_threads(1)
    take_fixture(FIXTURE)
