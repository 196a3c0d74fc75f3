"""Reading a board that its writers are writing, without trusting or disturbing them.

Only pread: a mapped file that a writer truncates would kill the supervisor with SIGBUS. A slot counts
when two reads at least 1 ms apart are byte-identical, which needs no memory barrier on either side; the
read of the look before serves as the first of the two, so a quiet board costs one read and one memcmp.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from operator import ne
from pathlib import Path

from stallwatch.board.image import BoardImage
from stallwatch.board.lanes import Gap, Lanes
from stallwatch.board.processes import Processes
from stallwatch.board.seen import SeenBoard
from stallwatch.clock import Clock
from stallwatch.heartbeat import layout
from stallwatch.heartbeat.memory import read_header

GAP_S = 0.001
TRIES = 3
LOOKAHEAD = 32  # unused lane slots read beyond the last used one; slots are claimed lowest first
FULL_EVERY = 64  # looks
MAX_PROBLEMS = 32

_L = layout.LANE_SIZE


class BoardReader:
    """Looks at one board. One thread at a time. `sleep` is injected for tests."""

    def __init__(self, folder: Path, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self.folder = folder
        self._sleep = sleep
        self._fd = -1
        self._header = b""
        self._lay_out({"process_slots": 0, "lane_slots": 0, "incarnation": 0})
        self._looks = 0
        self._last = b""
        self._image: SeenBoard | None = None
        # Something moved or was half-written: the whole-board shortcut is off.
        self._restless = True
        self._problems: list[str] = []

    def _lay_out(self, fields: dict[str, int]) -> None:
        self._slots = fields["lane_slots"]
        self._incarnation = fields["incarnation"]
        self._processes = Processes(
            fields["process_slots"], folder=str(self.folder), refuse=self._refuse
        )
        self._lanes = Lanes(
            self._slots, self._processes, names=self._read_names, refuse=self._refuse
        )
        self._read_lanes = self._slots  # how many lane slots one reading covers

    def look(self, clock: Clock) -> BoardImage | None:
        """The board now, or None when it cannot be read (gone, truncated, not a board).

        Takes 1 ms when something changed since the last look, 2 ms when something is moving.
        """
        self._looks += 1
        first = self._read()
        if first is None:
            return None
        if first == self._last and not self._restless and self._image is not None:
            self._image = self._image.at(clock.monotonic_ns())
            return self._image
        return self._study(first, clock)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> bool:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            self._fd = os.open(self.folder / layout.BOARD_FILE, flags)
            raw = os.pread(self._fd, layout.HEADER_SIZE, 0)
        except OSError:
            self.close()
            return False
        fields = read_header(raw)
        if fields is None:
            self.close()
            return False
        self._header = raw[: layout.CONTROL]
        self._lay_out(fields)
        return True

    def _read(self) -> bytes | None:
        if self._fd < 0 and not self._open():
            return None
        if self._looks % FULL_EVERY == 0:
            self._read_lanes = self._slots
        size = self._lane_start(self._read_lanes)
        try:
            raw = os.pread(self._fd, size, 0)
        except OSError:
            return None
        if len(raw) < size or raw[: layout.CONTROL] != self._header:
            return None  # truncated, or its header overwritten: nothing in it can be placed
        if self._read_lanes < self._slots and any(raw[-_L : 8 - _L]):
            self._read_lanes = self._slots  # more were claimed than was looked ahead
            return self._read()
        return raw

    def _lane_start(self, slot: int) -> int:
        return layout.lane_offset(len(self._processes.slots), slot)

    def _study(self, first: bytes, clock: Clock) -> BoardImage | None:
        self._problems = []
        raws = self._slices(first)
        moved = list(map(ne, raws, self._lanes.raws))
        gap = Gap(self._lane_start(0), raws, moved, first, first)
        processes = self._processes.changed(first)
        if (any(moved) or processes) and not self._read_again(gap):
            return None
        now = clock.monotonic_ns()
        self._processes.take(processes, (first, gap.older, gap.newest), now)
        moving = self._lanes.take(gap, now)
        self._read_lanes = min(self._slots, self._lanes.used + LOOKAHEAD)
        self._last = gap.newest
        # A lane that moved after `first` was compared is found by the next look's comparison.
        self._restless = bool(self._lanes.odd or gap.newest is not first)
        survey, kept = self._lanes.survey(moved)
        self._image = SeenBoard.make(
            survey,
            kept,
            incarnation=self._incarnation,
            taken_ns=now,
            processes=self._processes.images(),
            moving=moving,
            problems=tuple(self._problems),
        )
        return self._image

    def _read_again(self, gap: Gap) -> bool:
        """Read until what moved stands still, at most TRIES times in all; False: unreadable."""
        self._sleep(GAP_S)
        second = self._read()
        if second is None:
            return False
        gap.older, gap.newest = gap.newest, second
        gap.shaky = gap.differing(second)
        still = {slot: self._lane_raw(second, slot) for slot in gap.shaky if gap.moved[slot]}
        for _ in range(TRIES - 2):
            if not still:
                break
            self._sleep(GAP_S)
            again = {slot: self._read_lane(slot) for slot in still}
            gap.late.update({slot: raw for slot, raw in again.items() if raw == still[slot]})
            still = {slot: raw for slot, raw in again.items() if slot not in gap.late}
        gap.moving = still
        return all(map(len, still.values()))

    def _read_lane(self, slot: int) -> bytes:
        """One lane slot; b"" when it cannot be read."""
        try:
            raw = os.pread(self._fd, _L, self._lane_start(slot))
        except OSError:
            return b""
        return raw if len(raw) == _L else b""

    def _lane_raw(self, board: bytes, slot: int) -> bytes:
        start = self._lane_start(slot)
        return board[start : start + _L]

    def _slices(self, board: bytes) -> list[bytes]:
        return [board[at : at + _L] for at in range(self._lane_start(0), len(board), _L)]

    def _refuse(self, problem: str) -> None:
        if len(self._problems) < MAX_PROBLEMS:
            self._problems.append(problem)

    def _read_names(self, slot: int) -> bytes | None:
        """The name table of a process slot."""
        start = layout.names_offset(len(self._processes.slots), self._slots, slot)
        try:
            return os.pread(self._fd, layout.NAMES * layout.NAME_SIZE, start)
        except OSError:
            return None
