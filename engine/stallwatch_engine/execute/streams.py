"""The two streams of a worker and their events, on whatever device it has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from stallwatch.heartbeat import Board
from stallwatch_engine.faults import Faults
from stallwatch_engine.inputs.staged import MODEL_STREAM
from stallwatch_engine.output.thread import COPY_STREAM
from stallwatch_engine.streams.accelerator import AcceleratorEvent, AcceleratorStream
from stallwatch_engine.streams.observe import ChannelObserver
from stallwatch_engine.streams.protocol import Event, Stream
from stallwatch_engine.streams.threaded import ThreadedEvent, ThreadedStream

SUPPLIER = "worker:0/model"


@dataclass(frozen=True, slots=True)
class Streams:
    """`model` computes, `copy` brings results to the host; `make_event` takes the event's name."""

    model: Stream
    copy: Stream
    make_event: Callable[[str], Event]

    def close(self, timeout_s: float) -> None:
        """Finish what is enqueued, then end."""
        self.model.close(timeout_s)
        self.copy.close(timeout_s)

    def abort(self) -> None:
        """Run nothing more; waits for events are given up."""
        for stream in (self.model, self.copy):
            if isinstance(stream, ThreadedStream):
                stream.abort()


def open_streams(device: torch.device, board: Board, faults: Faults) -> Streams:
    """Threaded streams on a CPU, torch's on an accelerator."""
    if device.type == "cpu":

        def threaded(name: str, lane: str) -> ThreadedStream:
            return ThreadedStream(name, observer=ChannelObserver(board.channel(lane), SUPPLIER))

        def event(name: str) -> ThreadedEvent:
            return ThreadedEvent(name, faults=faults)

        return Streams(threaded("model", MODEL_STREAM), threaded("copy", COPY_STREAM), event)
    return Streams(
        AcceleratorStream("model", device),
        AcceleratorStream("copy", device),
        lambda name: AcceleratorEvent(device, name),
    )
