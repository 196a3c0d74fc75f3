"""A bounded queue and a thread that writes it out: whoever offers is never held up."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque
from collections.abc import Callable

from stallwatch.process.tame import tame

PIPE_BUF = 4096
_GIVE_UP_S = 5.0  # the writer wakes at once; this is for a starved host


class Spool:
    """offer() returns at once; what does not fit is dropped and counted in lines.

    `write` may block for as long as it likes (a full disk, a dead terminal): only this thread
    waits.
    """

    def __init__(
        self, write: Callable[[bytes], None], *, name: str, max_bytes: int = 1 << 20
    ) -> None:
        self._write = write
        self._max = max_bytes
        self._wake = threading.Condition()
        self._queue: deque[bytes] = deque()
        self._size = 0
        self._closing = False
        self.dropped = 0  # lines
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def offer(self, data: bytes) -> bool:
        """Queue it; False when it was dropped."""
        with self._wake:
            if self._closing or self._size + len(data) > self._max:
                self.dropped += max(1, data.count(b"\n"))
                return False
            self._queue.append(data)
            self._size += len(data)
            self._wake.notify()
        return True

    def close(self, timeout_s: float = 1.0) -> bool:
        """Write what is queued, within the time; False when the thread had to be left behind."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout_s)
        with self._wake:
            self._queue.clear()
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._queue:
                    if self._closing:
                        return
                    self._wake.wait()
                data = self._queue.popleft()
            # A failing sink (closed pipe, full disk) must not end the thread: later it may work.
            try:
                self._write(data)
            except OSError:
                with self._wake:
                    self.dropped += max(1, data.count(b"\n"))
            with self._wake:
                self._size -= len(data)


class FdWriter:
    """Writes to a descriptor that may be a blocked pipe, a terminal or shared with others.

    O_NONBLOCK belongs to the open file description, that is, also to the shell that shares our
    terminal: it is never set. poll() says when PIPE_BUF bytes can be written without waiting.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller = select.poll()
        self._poller.register(fd, select.POLLOUT)
        self._poller.register(self._stop, select.POLLIN)

    def __call__(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            self._until_writable()
            view = view[os.write(self._fd, view[:PIPE_BUF]) :]

    def stop(self) -> None:
        """Give up on what cannot be written; nothing is written any more."""
        os.eventfd_write(self._stop, 1)

    def close(self) -> None:
        """Only once nobody can be inside a call."""
        os.close(self._stop)

    def _until_writable(self) -> None:
        events = dict(self._poller.poll())
        if self._stop in events or events.get(self._fd, 0) & (select.POLLERR | select.POLLNVAL):
            raise BrokenPipeError


class Passthrough:
    """The one way to our stderr for all engines' output. On a terminal it is tamed."""

    def __init__(self, fd: int = 2, *, max_bytes: int = 1 << 20) -> None:
        self._terminal = os.isatty(fd)
        self._writer = FdWriter(fd)
        self._spool = Spool(self._writer, name="stderr", max_bytes=max_bytes)

    @property
    def dropped(self) -> int:
        """Lines that our stderr could not take."""
        return self._spool.dropped

    def offer(self, data: bytes) -> bool:
        return self._spool.offer(tame(data) if self._terminal else data)

    def close(self, timeout_s: float = 1.0) -> bool:
        """Write what can be written within the time, and give the rest up."""
        ended = self._spool.close(timeout_s)
        if not ended:
            self._writer.stop()
            ended = self._spool.close(_GIVE_UP_S)
        if ended:
            self._writer.close()
        return ended


class RotatingFile:
    """A log file of ours, 0600, at most `max_bytes`, with one predecessor (.1)."""

    def __init__(self, path: str, *, max_bytes: int = 16 << 20) -> None:
        self._path = path
        self._max = max_bytes
        self._fd = -1
        self._size = 0

    def __call__(self, data: bytes) -> None:
        if self._fd >= 0 and self._size + len(data) > self._max:
            self.close()
            os.replace(self._path, self._path + ".1")
        if self._fd < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(self._path, flags, 0o600)
            self._size = os.fstat(self._fd).st_size
        self._size += os.write(self._fd, data)

    def close(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1
