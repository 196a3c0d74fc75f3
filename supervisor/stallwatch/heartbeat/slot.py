"""The slot of one process: who it is, whether it is ready, what it has pending."""

from __future__ import annotations

import os
import struct
import threading
import time

from stallwatch.heartbeat import claims, layout
from stallwatch.heartbeat.marks import plain
from stallwatch.heartbeat.memory import BoardMemory
from stallwatch.heartbeat.names import clip
from stallwatch.heartbeat.proc import start_ticks


class ProcessSlot:
    """A process slot, or private memory. Everything but `pending` is written whole, in one store."""

    __slots__ = ("_body", "_lock", "_store", "_words", "index", "ticks")

    def __init__(self) -> None:
        self.index = -1
        self.ticks = 0
        self._lock = threading.RLock()
        self._body = bytearray(layout.PROCESS_SIZE)
        self._use(memoryview(bytearray(layout.PROCESS_SIZE)))

    def _use(self, memory: memoryview) -> None:
        self._words = memory.cast("l")
        self._store = memory[layout.P_GENERATION : layout.P_PENDING]

    def forget(self) -> None:
        """Stop writing to the board (after a fork the slot is the parent's)."""
        self.index = -1
        self._lock = threading.RLock()
        self._body = bytearray(layout.PROCESS_SIZE)
        self._use(memoryview(bytearray(layout.PROCESS_SIZE)))

    def claim(self, memory: BoardMemory) -> bool:
        """Own a slot of the board. False when there is none."""
        slot = claims.claim(memory.claims, "p", memory.processes)
        if slot < 0:
            return False
        start = layout.process_offset(slot)
        pending = self._words[layout.P_PENDING // 8]
        self._use(memory.bytes[start : start + layout.PROCESS_SIZE])
        self.index = slot
        self.ticks = start_ticks(os.getpid())
        self._words[layout.P_PENDING // 8] = pending
        return True

    def publish(self, role: str, rank: int, dump: tuple[int, str]) -> None:
        """Say who this process is; readers see the slot from here on."""
        now = time.monotonic_ns()
        with self._lock:
            body = self._body
            struct.pack_into(
                "<QIiQQ", body, layout.P_GENERATION, now, os.getpid(), rank, self.ticks, now
            )
            struct.pack_into("<I", body, layout.P_SIGNAL, dump[0])
            _text(body, layout.P_ROLE, layout.P_ROLE_SIZE, role)
            _text(body, layout.P_DUMP, layout.P_DUMP_SIZE, dump[1])
            self._write()

    def flag(self, bit: int) -> None:
        """Set one of the FLAG_ bits."""
        with self._lock:
            (flags,) = struct.unpack_from("<I", self._body, layout.P_FLAGS)
            struct.pack_into("<I", self._body, layout.P_FLAGS, flags | bit)
            self._write()

    def lease(self, name: str, owner: str, entered_ns: int, until_ns: int) -> None:
        """Write the pause lease in force; until 0: none."""
        with self._lock:
            struct.pack_into("<QQ", self._body, layout.P_PAUSE_ENTERED, entered_ns, until_ns)
            _text(self._body, layout.P_PAUSE_NAME, layout.P_PAUSE_SIZE, name)
            _text(self._body, layout.P_PAUSE_OWNER, layout.P_PAUSE_SIZE, owner)
            self._write()

    def pending(self, n: int) -> None:
        """The gauge: one word, one store, no stamp."""
        self._words[30] = plain(n)  # P_PENDING // 8

    def _write(self) -> None:
        # The slot is filled beside the board and copied by one store: nothing can stop it half way
        # but the kernel (see marks.py).
        data = bytes(self._body[layout.P_GENERATION : layout.P_PENDING])
        store, whole, words = self._store, slice(None), self._words
        stamp = time.monotonic_ns()
        words[0] = 0
        store[whole] = data
        words[0] = stamp


def _text(body: bytearray, start: int, size: int, text: str) -> None:
    raw = clip(text, size)
    body[start : start + size] = raw.ljust(size, b"\0")
