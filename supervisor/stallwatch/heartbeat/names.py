"""The names of one process: phases, details, wait targets. A mark stores only their numbers."""

from __future__ import annotations

import threading

from stallwatch.heartbeat import layout

OTHER = "(other)"  # what names beyond the table's room are called


def clip(text: str, size: int) -> bytes:
    """The text as UTF-8 in at most `size` bytes, never cut inside a character."""
    raw = text.encode("utf-8", "replace")
    if len(raw) <= size:
        return raw
    return raw[:size].decode("utf-8", "ignore").encode("utf-8")


class NameTable:
    """Gives every (name, limit) a number for the life of the process.

    The numbers survive a fork: the child writes the same entries into its own slot, so that marks
    bound in the parent stay valid.
    """

    __slots__ = ("_entries", "_ids", "_lock", "_memory")

    def __init__(self) -> None:
        self._ids: dict[tuple[str, int], int] = {}
        self._entries = bytearray(layout.NAMES * layout.NAME_SIZE)
        self._memory: memoryview | None = None
        self._lock = threading.RLock()

    def bind(self, memory: memoryview | None) -> None:
        """Write what is known so far into a table of the board, and all later names too."""
        self._lock = threading.RLock()  # after a fork the old one may be held by nobody
        self._memory = memory
        if memory is not None:
            memory[:] = self._entries

    def number(self, name: str, limit_ns: int = 0) -> int:
        """The number of a name, 0 for the empty one."""
        if not name:
            return 0
        found = self._ids.get((name, limit_ns))
        return self._add(name, limit_ns) if found is None else found

    def _add(self, name: str, limit_ns: int) -> int:
        with self._lock:
            key = (name, limit_ns)
            if key in self._ids:
                return self._ids[key]
            number = len(self._ids) + 1
            if number >= layout.NAMES - 1:
                # Not remembered: a caller that makes names up must not grow our memory.
                number, name, limit_ns = layout.NAMES - 1, OTHER, 0
            else:
                self._ids[key] = number
            text = clip(name, layout.N_TEXT_SIZE)
            entry = limit_ns.to_bytes(8, "little") + bytes([len(text)]) + text
            start = number * layout.NAME_SIZE
            self._entries[start : start + len(entry)] = entry
            if self._memory is not None:
                self._memory[start : start + len(entry)] = entry
            return number

    def word(
        self, phase: str, cls: str, names: tuple[str, ...], on: str, *, limit_ns: int = 0
    ) -> int:
        """The frame word of a phase: all that is constant about it in 64 bits."""
        first, second = (*names[:2], "", "")[:2]
        return (
            layout.CLASSES[cls]
            | min(len(names), 2) << layout.DETAILS_SHIFT
            | self.number(phase, limit_ns) << layout.PHASE_SHIFT
            | self.number(on) << layout.WAIT_SHIFT
            | self.number(first) << layout.NAME0_SHIFT
            | self.number(second) << layout.NAME1_SHIFT
        )
