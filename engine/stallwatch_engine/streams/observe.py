"""A stream's heartbeat channel: what the stream stands at, and whom it waits for."""

from __future__ import annotations

from stallwatch.heartbeat import Lane


class ChannelObserver:
    """Writes a channel from the stream's own thread: `board.channel("stream/model")` and the like.

    `supplier` is the lane that gives the stream its work.
    """

    def __init__(self, lane: Lane, supplier: str) -> None:
        self._lane = lane
        self._supplier = supplier

    def begin(self, operation: str, on: str) -> None:
        if on:
            self._lane.wait(operation, on=on)
        else:
            self._lane.enter(operation)

    def idle(self) -> None:
        self._lane.idle(on=self._supplier)
