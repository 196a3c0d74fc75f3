"""The supervisor's word to the engine: failed, or please stop."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from stallwatch.errors import BoardError
from stallwatch.heartbeat import layout, record
from stallwatch.heartbeat.failure import Failure


class ControlWriter:
    """Writes the control word and the failure record, with pwrite: nothing of it is ever mapped."""

    def __init__(self, file: Path) -> None:
        try:
            self._fd = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise BoardError(
                f"the board {file} cannot be opened: {error.strerror}",
                hint="it is removed with its incarnation; was the engine already ended?",
            ) from error
        # Whoever wrote here before us may have left a record: a writer that starts at 0 again would
        # publish another record under a sequence that readers have already cached.
        found = os.pread(self._fd, 16, layout.CONTROL)
        self._word, seq = struct.unpack("<QQ", found) if len(found) == 16 else (0, 0)
        self._seq = seq + (seq & 1)

    def declare(self, failure: Failure) -> None:
        """Publish the FAILURE: the record first, the word that makes it visible last."""
        raw = record.encode(failure)
        self._put(layout.FAILURE_SEQ, self._seq + 1)
        os.pwrite(self._fd, raw, layout.FAILURE_RECORD)
        self._put(layout.FAILURE_LENGTH, len(raw))
        self._seq += 2
        self._put(layout.FAILURE_SEQ, self._seq)
        self._set(self._word | layout.CONTROL_FAILED)

    def ask_stop(self) -> None:
        """Tell the engine's processes that a stop was asked for."""
        self._set(self._word | layout.CONTROL_STOP)

    def stop_asked(self) -> bool:
        """Whether ask_stop() was called since the last clear()."""
        return bool(self._word & layout.CONTROL_STOP)

    def clear(self) -> None:
        """Take everything back."""
        self._set(0)

    def close(self) -> None:
        """Close the file; the words stay on the board."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _set(self, word: int) -> None:
        self._word = word
        self._put(layout.CONTROL, word)

    def _put(self, offset: int, value: int) -> None:
        os.pwrite(self._fd, struct.pack("<Q", value), offset)
