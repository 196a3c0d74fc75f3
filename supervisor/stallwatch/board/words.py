"""The names of one process and the frame words made of them. Bounded, whatever is written there."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from stallwatch.board.image import LaneClass
from stallwatch.heartbeat import layout

if TYPE_CHECKING:
    from stallwatch.board.glance import Outline

UNKNOWN = "?"
LIMIT_MAX_NS = 10 * 365 * 86400 * 10**9
_CLASSES = {int(cls): cls for cls in LaneClass}
_MAX_WORDS = 1024


class Refused(ValueError):
    """These bytes cannot be a slot. The message is safe to show."""


class PhaseWord(NamedTuple):
    """A frame word with its names looked up."""

    name: str
    cls: LaneClass
    limit_ns: int  # bound to the name; 0: none
    has_limit: bool  # the frame's own limit counts
    names: tuple[str, ...]
    wait_on: str
    text: int  # bytes of text


def clean(raw: bytes) -> str:
    """A name for people: up to the first NUL, printable, no longer than it was."""
    text = raw.partition(b"\0")[0].decode("utf-8", "replace")
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


class Words:
    """Looks up frame words. Entries are decoded when first used, words once."""

    __slots__ = ("_names", "_table", "known", "outlines", "stale")

    def __init__(self) -> None:
        self._table = b""
        self._names: dict[int, tuple[str, int]] = {0: ("", 0)}
        self.known: dict[int, PhaseWord] = {}  # words met so far
        # What the reader made of the lanes' slots with these words; forgotten with them.
        self.outlines: dict[tuple[object, ...], Outline] = {}
        self.stale = False  # a number was met that is not in the table as last read

    def learn(self, table: bytes) -> bool:
        """Take the table as it is now; False when nothing in it is new."""
        self.stale = False
        if table == self._table:
            return False
        self._table = table
        self._names = {0: ("", 0)}
        self.known.clear()
        self.outlines.clear()
        return True

    def keep(self, key: tuple[object, ...], outline: Outline, words: tuple[int, ...]) -> bool:
        """Remember an outline; False when one of its words waits for a name to be read."""
        if not all(word in self.known for word in words):
            return False
        if len(self.outlines) >= _MAX_WORDS:
            self.outlines.clear()
        self.outlines[key] = outline
        return True

    def look_up(self, word: int) -> PhaseWord:
        """The meaning of a word that is not in `known`; missing names read "?". Raises Refused."""
        cls = _CLASSES.get(word & layout.CLASS_MASK)
        count = word >> layout.DETAILS_SHIFT & layout.DETAILS_MASK
        text = word >> layout.TEXT_SHIFT & layout.TEXT_MASK
        if cls is None or count > 2 or text > layout.TEXT_SIZE:
            raise Refused(f"frame word {word:#x} is none")
        stale, self.stale = self.stale, False
        name, limit = self._name(word >> layout.PHASE_SHIFT)
        found = PhaseWord(
            name=name or UNKNOWN,
            cls=cls,
            limit_ns=limit,
            has_limit=bool(word & layout.HAS_LIMIT),
            names=tuple(
                self._name(word >> shift)[0]
                for shift in (layout.NAME0_SHIFT, layout.NAME1_SHIFT)[:count]
            ),
            wait_on=self._name(word >> layout.WAIT_SHIFT)[0],
            text=text,
        )
        if not self.stale:  # complete: it will not change any more
            if len(self.known) >= _MAX_WORDS:
                self.known.clear()
            self.known[word] = found
        self.stale |= stale
        return found

    def _name(self, number: int) -> tuple[str, int]:
        number &= layout.ID_MASK
        found = self._names.get(number)
        if found is None:
            found = self._read_name(number)
            if found is None:
                self.stale = True
                return UNKNOWN, 0
            self._names[number] = found
        return found

    def _read_name(self, number: int) -> tuple[str, int] | None:
        entry = self._table[number * layout.NAME_SIZE : (number + 1) * layout.NAME_SIZE]
        if len(entry) < layout.NAME_SIZE or not 0 < entry[layout.N_LENGTH] <= layout.N_TEXT_SIZE:
            return None
        limit = int.from_bytes(entry[:8], "little")
        text = clean(entry[layout.N_TEXT : layout.N_TEXT + entry[layout.N_LENGTH]])
        return text or UNKNOWN, limit if limit <= LIMIT_MAX_NS else 0
