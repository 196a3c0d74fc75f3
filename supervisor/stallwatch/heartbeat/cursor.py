"""Where a lane writes: a slot of the board, or private memory that nobody reads."""

from __future__ import annotations

import time
from collections.abc import Callable

from stallwatch.heartbeat import layout


class Cursor:
    """The writing state of one lane, shared by all marks bound to it. One writer at a time.

    A lane without a board, after a fork, or closed writes into `scratch`: the same stores at the
    same cost, so the hot path needs no test. `clock` is the second hook without a test: while a lane
    still has to claim its slot, reading the clock does it.
    """

    __slots__ = (
        "clock",
        "depth",
        "frames",
        "m",
        "scratch",
        "slot",
        "sunk",
        "text",
        "top",
        "work",
    )

    def __init__(self) -> None:
        self.scratch = memoryview(bytearray(layout.LANE_SIZE))
        self.sunk = memoryview(bytearray(layout.FRAME_WORDS * 8)).cast("l")
        self.clock: Callable[[], int] = time.monotonic_ns
        self.work = 0
        self.slot = -1  # of the lane table, -1: none
        self.bind(self.scratch)

    def bind(self, slot: memoryview) -> None:
        """Write into these LANE_SIZE bytes from now on, at depth 1."""
        words = slot.cast("l")
        start, step = layout.L_FRAMES, layout.FRAME_WORDS
        self.depth = 1
        self.m = words
        self.text = slot[layout.L_TEXT : layout.L_TEXT + layout.TEXT_SIZE]
        # frames[depth]; index 0 only keeps the hot path free of a subtraction.
        self.frames = (
            self.sunk,
            *(words[start + i * step : start + (i + 1) * step] for i in range(layout.MAX_DEPTH)),
        )
        self.top = self.frames[1]

    def drop(self) -> None:
        """Stop writing to the board; marks go on costing the same and say nothing."""
        self.bind(self.scratch)

    def sink(self, depth: int) -> None:
        """Enter a phase deeper than the board holds: count it, and let its marks go nowhere."""
        self.depth = depth
        self.top = self.sunk
        self.m[layout.L_TOO_DEEP] += 1
