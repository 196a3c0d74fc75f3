"""The process slots of a board, as they were last seen whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from stallwatch.board import decode
from stallwatch.board.image import ProcessImage
from stallwatch.board.words import Words
from stallwatch.heartbeat import layout

_P = layout.PROCESS_SIZE
_NO_PROCESS = bytes(layout.P_PENDING)


class Process:
    """What is remembered of one process slot, names included."""

    __slots__ = ("image", "key", "raw", "words")

    def __init__(self) -> None:
        self.raw = _NO_PROCESS
        self.image: ProcessImage | None = None
        self.key: decode.Key | None = None
        self.words = Words()


class Processes:
    """All process slots of one board. `refuse` is told what cannot be a process."""

    def __init__(self, slots: int, *, folder: str, refuse: Callable[[str], None]) -> None:
        self.slots = [Process() for _ in range(slots)]
        self._folder = folder
        self._refuse = refuse
        self._calm = b""  # all slots when nothing about them was new
        self._images: tuple[ProcessImage, ...] | None = None  # None: to be put together again

    def at(self, slot: int) -> Process | None:
        """One slot; None when the board has no such slot."""
        return self.slots[slot] if slot < len(self.slots) else None

    def changed(self, board: bytes) -> list[int]:
        """The slots that are not as they were last taken, pending work aside."""
        return [] if self._area(board) == self._calm else self._changed(board)

    def take(self, slots: list[int], reads: tuple[bytes, bytes, bytes], now: int) -> None:
        """Take over what is the same in the last two readings of a look, and all pending work.

        reads: the first, the last but one, the last. `slots` are those changed in the first.
        """
        first, older, newest = reads
        known = self._area(first)
        if slots:
            self._take(slots, (older, newest), now)
        if known != self._calm or (newest is not first and self._area(newest) != self._calm):
            self._take_pending(newest)
            # Not what `newest` shows: a change between the two readings is still to be taken.
            self._calm = b"" if slots else known
            self._images = None

    def images(self) -> tuple[ProcessImage, ...]:
        """The processes; the same object as long as nothing about them changes."""
        if self._images is None:
            self._images = tuple(s.image for s in self.slots if s.image is not None)
        return self._images

    def _area(self, board: bytes) -> bytes:
        return board[layout.HEADER_SIZE : layout.process_offset(len(self.slots))]

    def _changed(self, board: bytes) -> list[int]:
        changed = []
        for slot, state in enumerate(self.slots):
            start = layout.process_offset(slot)
            if board[start : start + layout.P_PENDING] != state.raw:
                changed.append(slot)
        return changed

    def _take(self, slots: list[int], reads: tuple[bytes, bytes], now: int) -> None:
        for slot in slots:
            start = layout.process_offset(slot)
            older, newer = (read[start : start + _P] for read in reads)
            body = newer[: layout.P_PENDING]
            if older[: layout.P_PENDING] != body or (any(body) and not any(body[:8])):
                continue  # being written: what was known stays, the next look tries again
            state = self.slots[slot]
            state.raw = body
            if not any(body[8:]):
                state.image = state.key = None
                continue
            try:
                key, state.image = decode.process(slot, newer, folder=self._folder, now=now)
            except decode.Refused as error:
                self._refuse(str(error))
                state.image = state.key = None
                continue
            if key != state.key:
                state.key = key
                state.words = Words()

    def _take_pending(self, board: bytes) -> None:
        for slot, state in enumerate(self.slots):
            if state.image is None:
                continue
            start = layout.process_offset(slot)
            value = decode.pending(board[start : start + _P])
            if value != state.image.pending:
                state.image = replace(state.image, pending=value)
