"""What a look needs of every lane, and the full image of those that somebody asks for.

Hundreds of lanes move between two looks, and nearly all of them only restart their clock: for the
rules it is enough to know since when. A LaneImage of each costs more than all the rest of a look, so
it is made when it is first read.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from stallwatch.board import decode
from stallwatch.board.image import LaneClass, LaneImage, PhaseFrame
from stallwatch.board.words import PhaseWord, Words
from stallwatch.heartbeat import layout

Row = tuple[Any, ...]

# A lane slot by its depth: head, depth, work, too deep; entered, word, progress, limit of each frame.
_FRAMES_AT = layout.L_FRAMES * 8 - decode.HEAD_BYTES - 24
ROWS: dict[int, Callable[[bytes], Row]] = {
    depth: struct.Struct(f"<{decode.HEAD_BYTES}sQQQ{_FRAMES_AT}x" + "QQQq32x" * depth).unpack_from
    for depth in range(1, layout.MAX_DEPTH + 1)
}


class Outline:
    """All that stays the same of a lane while it only beats: who it is and in which phases.

    Compared by identity: the same outline means that nothing of it changed.
    """

    __slots__ = (
        "address", "complete", "depth", "idle", "judged", "levels", "meanings", "resting", "starting",
        "starts", "who",
    )  # fmt: skip

    def __init__(
        self,
        who: decode.Identity,
        levels: tuple[PhaseFrame, ...],
        meanings: tuple[PhaseWord, ...] = (),
    ) -> None:
        self.who = who
        self.levels = levels  # names, classes and limits; the times in here are 0
        self.meanings = meanings
        self.address = f"{who.role}:{who.rank}/{who.name}"
        self.depth = len(levels)
        self.judged = bool(levels) and not who.closed
        inner = levels[-1].cls if levels else LaneClass.IDLE
        self.idle = inner is LaneClass.IDLE
        self.starting = inner is LaneClass.START
        self.starts = any(level.cls is LaneClass.START for level in levels)
        self.resting = self.idle and len(levels) > 1  # idle below an outer phase
        self.complete = True  # no name in it is still to be read

    @classmethod
    def read(cls, who: decode.Identity, raw: bytes) -> Outline:
        """The outline of a slot. Raises Refused, or Unfinished."""
        found = decode.frames(who.words, raw)
        return cls(who, tuple(level for _, level in found), tuple(word for word, _ in found))

    @classmethod
    def of(cls, lane: LaneImage) -> Outline:
        """The outline of an image that no slot was read for."""
        who = decode.Identity(
            lane.slot, lane.pid, lane.tid, lane.start_ticks, lane.role, lane.rank, lane.name,
            lane.channel, lane.closed, _NO_WORDS,
        )  # fmt: skip
        return cls(who, lane.stack)


_NO_WORDS = Words()


class Glance:
    """One lane at one look. An unchanged lane keeps its glance from look to look."""

    __slots__ = ("_image", "beats", "moving", "now", "oldest", "outline", "raw", "work")

    outline: Outline
    work: int
    oldest: int  # ns: no level's clock was started before
    beats: int
    raw: bytes
    now: int
    moving: bool
    _image: LaneImage | None

    @classmethod
    def of(cls, lane: LaneImage) -> Glance:
        """The glance of an image that is already there."""
        return cls.altered(Outline.of(lane), lane)

    @classmethod
    def altered(cls, outline: Outline, lane: LaneImage) -> Glance:
        """The same lane with another image: torn, or known to be alive."""
        self = cls()
        self.outline = outline
        self.work = lane.work
        self.oldest = min((max(f.entered_ns, f.progress_ns) for f in lane.stack), default=0)
        self.raw = b""
        self._image = lane
        return self

    @property
    def image(self) -> LaneImage:
        """Everything about the lane at that look. Any thread may ask: nothing here is shared."""
        if self._image is None:
            outline = self.outline
            self._image = decode.lane(
                outline.who, outline.meanings, self.raw,
                beats=self.beats, now=self.now, moving=self.moving,
            )  # fmt: skip
        return self._image


def glance(
    outline: Outline, raw: bytes, row: Row, *, beats: int, now: int, moving: bool = False
) -> Glance:
    """A glance at a slot whose outline is known. Never fails."""
    found = Glance()  # filled from outside: a constructor would cost as much again
    found.outline = outline
    found.work = row[2]
    oldest: int = row[4] if row[4] > row[6] else row[6]  # noqa: FURB136  (max() costs a call)
    if moving or outline.depth > 1 or oldest > now:
        oldest = _oldest(row, now, moving=moving)
    found.oldest = oldest
    found.raw = raw
    found.beats = beats
    found.now = now
    found.moving = moving
    found._image = None
    return found


def _oldest(row: Row, now: int, *, moving: bool) -> int:
    """The earliest of the levels' clocks; in the future, or known to be just restarted: now."""
    clocks: list[int] = [max(pair) for pair in zip(row[4::4], row[6::4], strict=True)]
    if moving:
        clocks[-1] = now
    return min(*clocks, now)
