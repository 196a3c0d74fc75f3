"""The lane slots of a board, as they were last seen whole: nearly all by columns, some on their own."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from itertools import compress, count
from operator import add

from stallwatch.board import decode
from stallwatch.board.columns import Columns, Kept, Lineup, Survey
from stallwatch.board.glance import ROWS, Glance, Outline, Row, glance
from stallwatch.board.processes import Processes
from stallwatch.board.words import Words
from stallwatch.heartbeat import layout

MAX_TABLES = 64  # name tables read per look
_NO_LANE = bytes(layout.LANE_SIZE)


class _Lane:
    """What is remembered of one lane slot."""

    __slots__ = ("glance", "head", "key", "who")

    def __init__(self) -> None:
        self.glance: Glance | None = None  # at the last good copy that was read on its own
        self.key: decode.Key | None = None
        self.head = b""
        self.who: decode.Identity | None = None  # what `head` says


@dataclass(slots=True)
class Gap:
    """The readings of one look: what moved since the look before, and what of it stands still."""

    start: int  # where the lanes begin
    raws: list[bytes]  # the first reading, lane by lane
    moved: list[bool]  # since the look before
    older: bytes  # the first whole reading, and the second if there was one
    newest: bytes
    shaky: list[int] = field(default_factory=list)  # differ between the first and the second
    late: dict[int, bytes] = field(default_factory=dict)  # moved, and settled only after that
    moving: dict[int, bytes] = field(default_factory=dict)  # moved, and never settled

    def differing(self, board: bytes) -> list[int]:
        """The slots that are not in this reading what they were in the first."""
        if board == self.older:
            return []
        size = layout.LANE_SIZE
        # startswith() compares in place, without a copy of each slot.
        return [
            s for s, raw in enumerate(self.raws) if not board.startswith(raw, self.start + s * size)
        ]


class Lanes:
    """All lane slots of one board.

    `names` reads the name table of a process slot, `refuse` is told what cannot be a lane.
    """

    def __init__(
        self,
        slots: int,
        processes: Processes,
        *,
        names: Callable[[int], bytes | None],
        refuse: Callable[[str], None],
    ) -> None:
        self._processes = processes
        self._names = names
        self._refuse = refuse
        self._lanes = [_Lane() for _ in range(slots)]
        # By lane slot: as of the last settled reading, b"" when it must be decoded again;
        self.raws = [_NO_LANE] * slots
        self._beats = [0] * slots  # looks at which the present owner was seen to have moved;
        self._outlines: list[Outline | None] = [None] * slots
        # and these two for the slots that one reading covers.
        self._works: list[int] = []
        self._oldest: list[int] = []
        self._columns: Columns | None = None  # of the last reading at which lanes were taken
        # Lanes that are more than their columns: deep, moving, torn, odd. They are read one by one.
        self._apart: dict[int, Glance] = {}
        self._careful: set[int] = set()
        self._lineup = Lineup(())
        self._present: list[bool] = []
        self._taken_ns = 0
        self.odd: set[int] = set()  # lanes that settled half-written
        self.used = 0  # lane slots below this were used at some time
        self._tables = MAX_TABLES  # name tables that this look may still read

    def take(self, gap: Gap, now: int) -> tuple[str, ...]:
        """Take one look over; returns the addresses of the lanes that never held still."""
        self._tables = MAX_TABLES
        torn = {slot for slot in self.odd if slot < len(gap.raws) and not gap.moved[slot]}
        one_by_one = self._take_lanes(gap, now) if any(gap.moved) else []
        names = [self._take_moving(slot, raw, now) for slot, raw in gap.moving.items()]
        for slot in torn:
            self._take_torn(slot)
        self._set_apart({*one_by_one, *gap.moving, *torn}, gap.shaky)
        self.used = max(self.used, 1 + max(compress(count(), gap.moved), default=-1))
        self._taken_ns = now
        return tuple(name for name in names if name)

    def survey(self, moved: list[bool]) -> tuple[Survey, Kept]:
        """All lanes as they stand now, and what their images can be made of."""
        present = self._present
        survey = Survey(
            self._lineup,
            tuple(compress(self._works, present)),
            tuple(compress(self._oldest, present)),
            tuple(compress(moved, present)),
        )
        kept = Kept(
            tuple(compress(self.raws, present)),
            tuple(compress(self._beats, present)),
            dict(self._apart),
        )
        return survey, kept

    def _take_lanes(self, gap: Gap, now: int) -> list[int]:
        """Take over what settled; returns the slots that did more than beat."""
        lanes = len(gap.raws)
        columns = Columns(gap.newest, gap.start, lanes)
        # A lane that moved in the gap shows columns that are not settled: it keeps what it had.
        self._careful.update(gap.shaky)
        for slot in gap.shaky:
            if slot < len(self._works):
                columns.works[slot] = self._works[slot]
                columns.oldest[slot] = self._oldest[slot]
        odd = columns.odd(self._columns, now) | self._careful
        one_by_one = [s for s in odd if s < lanes and gap.moved[s] and s not in gap.moving]
        self._columns = columns
        self._works, self._oldest = columns.works, columns.oldest
        for slot in *one_by_one, *gap.moving:
            self._keep_good_copy(slot)
            gap.moved[slot] = False  # these count their beats themselves: the owner may be new
        self.raws[:lanes] = gap.raws
        self._beats[:lanes] = map(add, self._beats, gap.moved)
        for slot in *one_by_one, *gap.moving:
            gap.moved[slot] = True
        for slot in one_by_one:
            self.odd.discard(slot)
            self._take_lane(slot, gap.late.get(slot, gap.raws[slot]), now)
        return one_by_one

    def _take_lane(self, slot: int, raw: bytes, now: int) -> None:
        state = self._lanes[slot]
        self.raws[slot] = raw
        who = self._who(slot, raw)
        if who is None:
            return
        self._beats[slot] += 1
        try:
            state.glance = self._glance(slot, who, raw, now=now)
        except decode.Unfinished:
            self.odd.add(slot)  # the glance stays the last good copy
        except decode.Refused as error:
            state.glance = None
            self._refuse(f"lane slot {slot}: {error}")

    def _take_moving(self, slot: int, raw: bytes, now: int) -> str:
        """A lane that is being written right now: its address, "" when it makes no sense yet.

        Its counters and outer phases are single words and right; the inner clock is known to have
        been restarted within the last gap.
        """
        state = self._lanes[slot]
        self.raws[slot] = b""
        self.odd.discard(slot)
        who = self._who(slot, raw)
        if who is None:
            return ""
        self._beats[slot] += 1
        try:
            state.glance = self._glance(slot, who, raw, now=now, moving=True)
        except decode.Unfinished:
            if state.glance is not None:
                image = state.glance.image
                inner = replace(image.stack[-1], progress_ns=now)
                stack = (*image.stack[:-1], inner)
                image = replace(image, stack=stack, beats=self._beats[slot], torn=False)
                state.glance = Glance.altered(state.glance.outline, image)
        except decode.Refused:
            state.glance = None
        return state.glance.outline.address if state.glance else ""

    def _glance(
        self, slot: int, who: decode.Identity, raw: bytes, *, now: int, moving: bool = False
    ) -> Glance:
        """Read a slot whose outline may be new. Raises Refused, or Unfinished."""
        unpack = ROWS.get(raw[decode.HEAD_BYTES])
        row: Row = unpack(raw) if unpack is not None else ()
        outline = who.words.outlines.get(row[:2] + row[5::2])
        if outline is None or outline.who is not who or 0 in row[4::4]:
            outline = Outline.read(who, raw)
            if who.words.stale and self._learn(who.words, decode.lane_owner(raw)):
                outline = Outline.read(who, raw)
            outline.complete = who.words.keep(row[:2] + row[5::2], outline, row[5::4])
        return glance(outline, raw, row, beats=self._beats[slot], now=now, moving=moving)

    def _keep_good_copy(self, slot: int) -> None:
        """What the columns said of a lane so far, before it is read on its own."""
        outline, raw = self._outlines[slot], self.raws[slot]
        if outline is not None and slot not in self._apart:
            row = ROWS[outline.depth](raw)
            self._lanes[slot].glance = glance(
                outline, raw, row, beats=self._beats[slot], now=self._taken_ns
            )

    def _set_apart(self, slots: set[int], shaky: Collection[int]) -> None:
        """Sort the lanes that were read on their own: the columns say all about most of them."""
        more = max(slots, default=-1) + 1 - len(self._works)
        if more > 0:
            self._works += [0] * more
            self._oldest += [0] * more
        for slot in slots:
            seen = self._lanes[slot].glance
            self._outlines[slot] = seen.outline if seen else None
            if seen is not None and slot not in shaky and self._in_columns(slot, seen):
                self._careful.discard(slot)
                self._apart.pop(slot, None)
                continue
            self._careful.add(slot)
            if seen is None:
                self._apart.pop(slot, None)
            else:
                self._apart[slot] = seen
        for slot, seen in self._apart.items():
            self._works[slot] = seen.work
            self._oldest[slot] = seen.oldest
        if slots:
            self._present = [outline is not None for outline in self._outlines]
            outlines = tuple(outline for outline in self._outlines if outline is not None)
            if outlines != self._lineup.outlines:
                self._lineup = Lineup(outlines)

    def _in_columns(self, slot: int, seen: Glance) -> bool:
        """Whether nothing is lost when the lane is made of its columns and bytes."""
        return (
            seen.outline.depth == 1
            and seen.outline.complete
            and bool(seen.raw)
            and seen.raw is self.raws[slot]
            and (seen.work, seen.oldest) == (self._works[slot], self._oldest[slot])
        )

    def _take_torn(self, slot: int) -> None:
        """Half-written and unchanged over two looks: its writer stopped inside an update."""
        state = self._lanes[slot]
        if state.glance is None:
            self._refuse(f"lane slot {slot}: its writer stopped before the first update was whole")
        elif not state.glance.image.torn:
            torn = replace(state.glance.image, torn=True)
            state.glance = Glance.altered(state.glance.outline, torn)

    def _who(self, slot: int, raw: bytes) -> decode.Identity | None:
        """Whose lane it is; forgets everything about an earlier owner of the slot."""
        state = self._lanes[slot]
        head = raw[: decode.HEAD_BYTES]
        if head == state.head and state.who is not None:
            return state.who
        key = decode.lane_key(raw)
        if key != state.key:
            state.glance, state.key, self._beats[slot] = None, key, 0
        state.head, state.who = head, None
        if not key.generation:
            state.glance = None
            return None
        number = decode.lane_owner(raw)
        owner = self._processes.at(number)
        if owner is None or owner.image is None:
            self.raws[slot] = b""  # its process may be readable at the next look
            self._refuse(f"lane slot {slot}: process slot {number} is empty")
            return None
        try:
            state.who = decode.identity(slot, raw, owner.image, owner.words)
        except decode.Refused as error:
            self.raws[slot] = b""
            self._refuse(f"lane slot {slot}: {error}")
        return state.who

    def _learn(self, words: Words, number: int) -> bool:
        """Read a process's names again; at most a few tables a look, whatever writers do."""
        if self._tables <= 0:
            return False
        self._tables -= 1
        table = self._names(number)
        return table is not None and words.learn(table)
