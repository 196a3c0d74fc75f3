"""A lane as its thread uses it: phases, progress, waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable

from stallwatch.heartbeat import layout, marks
from stallwatch.heartbeat.cursor import Cursor
from stallwatch.heartbeat.names import NameTable, clip

_CACHED_WORDS = 1024
_SURE = 1 << 62  # well inside 64 bits
_MAX_LIMIT_S = 10 * 365 * 86400.0
_INFINITE = float("inf")


def limit_ns(limit: float | None) -> int:
    """A limit in nanoseconds, 0 for none.

    Raises ValueError for NaN, infinity, zero and negative limits, on a no-op board too: a
    limit that silently means "never" is how nets get lost.
    """
    if limit is None:
        return 0
    if not 0 < limit < _INFINITE:
        raise ValueError(f"limit={limit!r}: seconds, greater than 0 and finite")
    return max(1, int(min(limit, _MAX_LIMIT_S) * 1e9))


class Lane:
    """One line of progress with one writer. Made by Board.lane() and Board.channel().

    `pop` leaves the innermost phase entered by a bound push, `progress(n)` counts work. Both are
    bound functions: keep them in a local in a hot loop.
    """

    __slots__ = (
        "_deepen",
        "_enter",
        "_enter_text",
        "_names",
        "_on_close",
        "_words",
        "channel",
        "cursor",
        "name",
        "pop",
        "progress",
        "tid",
    )

    def __init__(self, name: str, names: NameTable, on_close: Callable[[Lane], None]) -> None:
        self.name = name
        self.channel = False
        self.tid = threading.get_native_id()
        self.cursor = Cursor()
        self.progress = marks.progressor(self.cursor)
        self.pop = marks.popper(self.cursor)
        self._enter = marks.enterer(self.cursor)
        self._deepen = marks.deepener(self.cursor)
        self._enter_text = marks.text_enterer(self.cursor)
        self._names = names
        self._on_close = on_close
        self._words: dict[tuple[str, ...], int] = {}

    # Bound once, called often.

    def marker(
        self,
        phase: str,
        *details: str,
        cls: str = "work",
        limit: float | None = None,
        on: str = "",
    ) -> marks.Mark:
        """A function that enters the phase with up to two integer details, in 250 ns."""
        word = self._names.word(phase, _checked(cls), details, on, limit_ns=limit_ns(limit))
        return (marks.detail_marker if details else marks.marker)(self.cursor, word)

    def pusher(
        self,
        phase: str,
        *details: str,
        cls: str = "work",
        limit: float | None = None,
        on: str = "",
    ) -> marks.Mark:
        """A function that enters the phase INSIDE the current one; undo it with `pop`.

        For wrappers: the outer phase keeps its own clock and limit meanwhile.
        """
        word = self._names.word(phase, _checked(cls), details, on, limit_ns=limit_ns(limit))
        return (marks.detail_pusher if details else marks.pusher)(self.cursor, word)

    def idle_marker(self, on: str = "") -> marks.Mark:
        """A mark for "waiting for work": no limit; `on` names the lane that supplies it."""
        return self.marker("idle", cls="idle", on=on)

    def wait_marker(
        self, phase: str, *details: str, on: str, limit: float | None = None
    ) -> marks.Mark:
        """A mark for "blocked on the lane `on`"."""
        return self.marker(phase, *details, cls="wait", limit=limit, on=on)

    # Convenient, a little dearer.

    def enter(  # noqa: PLR0917  (the documented order: phase, cls, limit, text)
        self,
        phase: str,
        /,
        cls: str = "work",
        limit: float | None = None,
        text: str = "",
        on: str = "",
        **details: int,
    ) -> None:
        """Replace the innermost phase AND its details, and restart its clock.

        At most two integer details are kept, and 256 bytes of text. limit is in seconds.
        """
        word = self._words.get((phase, cls, on, *details))
        if word is None or limit is not None or text:
            bits = self._bits(phase, cls, limit, on, details)
            if text:
                self._enter_with_text(bits, text)
            else:
                self._enter(*bits)
        elif details:
            self._enter(word, 0, *_two(details))
        else:
            self._enter(word, 0, 0, 0)

    def idle(self, on: str = "") -> None:
        """Waiting for work, no limit. `on`: from that lane."""
        self.enter("idle", "idle", on=on)

    def wait(self, phase: str, on: str, limit: float | None = None, **details: int) -> None:
        """Blocked on a named lane; feeds the wait-for graph."""
        self.enter(phase, "wait", limit, "", on, **details)

    def push(  # noqa: PLR0917
        self,
        phase: str,
        /,
        cls: str = "work",
        limit: float | None = None,
        text: str = "",
        on: str = "",
        **details: int,
    ) -> None:
        """enter(), but inside the current phase; undone by pop()."""
        bits = self._bits(phase, cls, limit, on, details)
        self._deepen(*bits)
        if text:
            self._enter_with_text(bits, text)

    def phase(  # noqa: PLR0917
        self,
        phase: str,
        /,
        cls: str = "work",
        limit: float | None = None,
        text: str = "",
        on: str = "",
        **details: int,
    ) -> Phase:
        """A context manager around push() and pop(). Four levels are recorded, deeper ones counted."""
        limit_ns(limit)
        _checked(cls)
        return Phase(self, lambda: self.push(phase, cls, limit, text, on, **details))

    def close(self) -> None:
        """Say that this line of progress has ended well; later marks say nothing."""
        self._on_close(self)

    def _bits(  # noqa: PLR0917  (by position: keywords would cost what this saves)
        self, phase: str, cls: str, limit: float | None, on: str, details: dict[str, int]
    ) -> tuple[int, int, int, int]:
        """Frame word, limit in ns and the two details of a phase."""
        word = self._words.get((phase, cls, on, *details))
        if word is None:
            word = self._names.word(phase, _checked(cls), tuple(details), on)
            if len(self._words) < _CACHED_WORDS:
                self._words[phase, cls, on, *details] = word
        ns = 0
        if limit is not None:
            ns = limit_ns(limit)
            word |= layout.HAS_LIMIT
        if not details:
            return word, ns, 0, 0
        return word, ns, *_two(details)

    def _enter_with_text(self, bits: tuple[int, int, int, int], text: str) -> None:
        raw = clip(text, layout.TEXT_SIZE)
        c = self.cursor
        shared = layout.TEXT_MASK << layout.TEXT_SHIFT
        for frame in c.frames[1 : c.depth]:  # one text per lane: outer phases give theirs up
            if frame[layout.F_WORD] & shared:
                frame[layout.F_WORD] &= ~shared
        word, *rest = bits
        self._enter_text((word | len(raw) << layout.TEXT_SHIFT, *rest), raw)


class Phase:
    """One nested phase as a context manager."""

    __slots__ = ("_depth", "_lane", "_push")

    def __init__(self, lane: Lane, push: Callable[[], None]) -> None:
        self._lane = lane
        self._push = push
        self._depth = 0

    def __enter__(self) -> Lane:
        self._push()
        self._depth = self._lane.cursor.depth
        return self._lane

    def __exit__(self, *_: object) -> None:
        # Whatever the body left open closes with it; what it closed too often stays closed.
        while self._lane.cursor.depth >= self._depth > 1:
            self._lane.pop()


def _checked(cls: str) -> str:
    if cls not in layout.CLASSES:
        raise ValueError(f"cls={cls!r}: one of {', '.join(layout.CLASSES)}")
    return cls


def _two(details: dict[str, int]) -> tuple[int, int]:
    """The first two values as exact 64-bit ints."""
    values = iter(details.values())
    a, b = next(values), next(values, 0)
    if a.__class__ is int and b.__class__ is int and -_SURE < a < _SURE and -_SURE < b < _SURE:
        return a, b
    return marks.plain(a), marks.plain(b)
