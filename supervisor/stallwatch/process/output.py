"""An engine's output is always read: a full pipe would stop the engine, and that would be us."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque

from stallwatch.process.spool import Passthrough, RotatingFile, Spool

_CHUNK = 65536
_CUT = b" [cut]"


class Ring:
    """The last lines, bounded in lines and bytes. Thread-safe."""

    def __init__(
        self, *, max_lines: int = 2000, max_bytes: int = 1 << 20, max_line: int = 8192
    ) -> None:
        self._lines: deque[bytes] = deque()
        self._max_lines = max_lines
        self._max_bytes = max_bytes
        self._max_line = max_line
        self._size = 0
        self._partial = b""
        self._skipping = False
        self._lock = threading.Lock()
        self.total = 0

    def feed(self, data: bytes) -> None:
        """Take output as it comes. A line that never ends is cut and its rest dropped."""
        with self._lock:
            *whole, rest = (self._partial + data).split(b"\n")
            for line in whole:
                if self._skipping:
                    self._skipping = False
                else:
                    self._append(line)
            if self._skipping:
                rest = b""
            elif len(rest) > self._max_line:
                self._append(rest)
                self._skipping, rest = True, b""
            self._partial = rest

    def tail(self, count: int) -> tuple[str, ...]:
        """The last lines, oldest first; the unfinished one last."""
        with self._lock:
            lines = [*self._lines, self._partial] if self._partial else list(self._lines)
        return tuple(line.decode("utf-8", "replace") for line in lines[-count:] if count > 0)

    def _append(self, line: bytes) -> None:
        line = line.rstrip(b"\r")
        if b"\r" in line:
            line = line[line.rindex(b"\r") + 1 :]  # a progress bar: only its last state is read
        if len(line) > self._max_line:
            line = line[: self._max_line] + _CUT
        self._lines.append(line)
        self._size += len(line)
        self.total += 1
        while len(self._lines) > self._max_lines or self._size > self._max_bytes:
            self._size -= len(self._lines.popleft())


class OutputPump:
    """Reads the pipe in a thread of its own; owns and closes its descriptor.

    Ring, file and our stderr each get a copy; the last two through bounded spools, so that
    neither a full disk nor a reader that stopped reading can hold the engine up.
    """

    def __init__(
        self,
        fd: int,
        *,
        ring: Ring,
        file: str | None = None,
        passthrough: Passthrough | None = None,
        file_bytes: int = 16 << 20,
    ) -> None:
        self.ring = ring
        self._fd = fd
        self._passthrough = passthrough
        self._dropped_stderr = 0
        self._sink = RotatingFile(file, max_bytes=file_bytes) if file else None
        self._spool: Spool | None = None
        self._thread = threading.Thread(target=self._run, name="engine-output", daemon=True)
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            os.set_blocking(fd, False)  # our end of a pipe of our own: shared with nobody
            if self._sink is not None:
                self._spool = Spool(self._sink, name="engine-log")
            self._thread.start()
        except BaseException:  # no thread, no room: the descriptor stays the caller's
            os.close(self._wake_read)
            os.close(self._wake_write)
            if self._spool is not None:
                self._spool.close()
            raise

    @property
    def dropped(self) -> int:
        """Lines that file or stderr did not get. The ring gets all."""
        return self._dropped_stderr + (self._spool.dropped if self._spool else 0)

    def finish(self, deadline_s: float = 1.0) -> bool:
        """The tree is gone: read what is left and end. False: an orphan still held the pipe.

        The end of the pipe comes only when its last holder ends, and that may be anybody.
        """
        self._thread.join(deadline_s)
        ended_by_itself = not self._thread.is_alive()
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"x")
        self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)
        if self._spool is not None and self._spool.close() and self._sink is not None:
            self._sink.close()
        return ended_by_itself

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        poller.register(self._wake_read, select.POLLIN)
        try:
            while True:
                ready = {fd for fd, _ in poller.poll()}
                if self._fd in ready and not self._read():
                    return
                if self._wake_read in ready:
                    return
        finally:
            os.close(self._fd)

    def _read(self) -> bool:
        """One chunk; False at the end of the pipe."""
        try:
            data = os.read(self._fd, _CHUNK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        self.ring.feed(data)
        if self._spool is not None:
            self._spool.offer(data)
        if self._passthrough is not None and not self._passthrough.offer(data):
            self._dropped_stderr += max(1, data.count(b"\n"))
        return True
