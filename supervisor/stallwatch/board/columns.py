"""All lanes of a reading at once, column by column.

Nearly all lanes that move only restart their clock and count. Taken one by one that costs a
microsecond or two each, 1 % of a core at 256 lanes and ten looks a second; taken as columns of the
board's words it costs a tenth, since the loops run inside CPython's own functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress, count
from operator import ne, not_
from typing import NamedTuple

from stallwatch.board.glance import Glance, Outline
from stallwatch.heartbeat import layout

_WORDS = layout.LANE_SIZE // 8
_ENTERED = layout.L_FRAMES + layout.F_ENTERED
_PROGRESS = layout.L_FRAMES + layout.F_PROGRESS
# Who a lane is, and the phase of a lane that is one level deep.
_STATED = (
    layout.L_GENERATION,
    layout.L_IDS,
    layout.L_TICKS,
    layout.L_OWNER,
    layout.L_DEPTH,
    layout.L_FRAMES + layout.F_WORD,
    layout.L_FRAMES + layout.F_LIMIT,
)


class Columns:
    """Some words of all lane slots of one reading. Nothing is checked here."""

    __slots__ = ("entered", "oldest", "stated", "works")

    def __init__(self, board: bytes, start: int, lanes: int) -> None:
        words = memoryview(board)[start : start + lanes * layout.LANE_SIZE].cast("Q")
        self.stated = [words[word::_WORDS].tobytes() for word in _STATED]
        self.works: list[int] = words[layout.L_WORK :: _WORDS].tolist()
        self.entered: list[int] = words[_ENTERED::_WORDS].tolist()
        progress: list[int] = words[_PROGRESS::_WORDS].tolist()
        self.oldest = list(map(max, self.entered, progress))

    def odd(self, before: Columns | None, now: int) -> set[int]:
        """Slots that must be read one by one: restated since `before`, half-written, or ahead of now."""
        lanes = len(self.entered)
        if before is None:
            return set(range(lanes))
        common = min(lanes, len(before.entered))
        found = set(compress(count(), map(not_, self.entered)))
        found.update(range(common, lanes))
        for new, old in zip(self.stated, before.stated, strict=True):
            if new[: 8 * common] != old[: 8 * common]:
                found.update(compress(count(), map(ne, _words(new), _words(old))))
        if self.oldest and max(self.oldest) > now:
            found.update(slot for slot, at in enumerate(self.oldest) if at > now)
        return found


def _words(column: bytes) -> list[int]:
    words: list[int] = memoryview(column).cast("Q").tolist()
    return words


class Lineup:
    """All lanes of a board, in order of their slots, and what follows from their outlines alone.

    The same object from look to look as long as no lane changes its phase.
    """

    __slots__ = (
        "judged",
        "leasts",
        "outlines",
        "resting",
        "starters",
        "starting",
        "threads",
        "tids",
        "who",
    )

    def __init__(self, outlines: tuple[Outline, ...]) -> None:
        judged = [outline for outline in outlines if outline.judged]
        self.outlines = outlines
        self.judged = [outline.judged for outline in outlines]
        self.who = tuple([outline.who for outline in judged])
        self.starters = frozenset(outline.who.pid for outline in judged if outline.starts)
        self.resting = frozenset(outline.who.slot for outline in judged if outline.resting)
        self.starting = any(outline.starting for outline in judged)
        # A note of the rules: (policy, warm-up, least age that may matter by lane).
        self.leasts: tuple[object, int, Sequence[int]] = (None, 0, ())
        self.threads = [
            (place, outline.who.pid, outline.who.tid)
            for place, outline in enumerate(outlines)
            if not outline.who.channel and not outline.who.closed
        ]
        self.tids: dict[int, set[int]] = {}
        for _, pid, tid in self.threads:
            self.tids.setdefault(pid, set()).add(tid)


class Survey(NamedTuple):
    """All lanes at one look: `lineup` says who, the others what, in the same order."""

    lineup: Lineup
    works: tuple[int, ...]
    oldest: tuple[int, ...]  # ns: no level's clock was started before
    moved: tuple[bool, ...] = ()  # since the look before; empty: unknown

    @classmethod
    def of(cls, glances: Sequence[Glance]) -> Survey:
        """The survey of lanes that are already there one by one."""
        return cls(
            Lineup(tuple(g.outline for g in glances)),
            tuple(g.work for g in glances),
            tuple(g.oldest for g in glances),
        )


class Kept(NamedTuple):
    """What lanes are decoded from when somebody asks for them, in the order of a lineup."""

    raws: tuple[bytes, ...]
    beats: tuple[int, ...]
    apart: Mapping[int, Glance]  # by slot: lanes that were read one by one
