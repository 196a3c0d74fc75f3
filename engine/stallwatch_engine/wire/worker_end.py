"""The worker's end of the wire: blocking calls, each with a deadline."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable

from stallwatch_engine.wire.frame import FrameDecoder, PeerBroke, PeerBusy, PeerGone
from stallwatch_engine.wire.messages import (
    Abort,
    Failed,
    Ready,
    Stats,
    Submit,
    Tokens,
    from_api,
    pack,
)

# Longer than the limits that a blocked loop has by default: who watches names the api before this end gives up.
SEND_S = 60.0
PEER = "api:0/loop"
_CHUNK = 1 << 16


class WorkerEnd:
    """One thread receives; any thread sends. After a WireError only close() is of use."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._decoder = FrameDecoder()
        self._sending = threading.Lock()
        self._broken = False

    @classmethod
    def from_fd(cls, fd: int) -> WorkerEnd:
        """From an inherited descriptor, which belongs to this object from now on."""
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        return self._sock.fileno()

    def receive(self, timeout_s: float) -> list[Submit | Abort]:
        """The messages that have come, [] when none did in time.

        PeerGone when the api ended, PeerBroke when it sent nonsense.
        """
        if not _ready(self._sock, select.POLLIN, timeout_s):
            return []
        try:
            data = self._sock.recv(_CHUNK)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError as error:
            raise PeerGone(f"the api is gone: {error}") from error
        if not data:
            raise PeerGone("the api closed its end" + (" inside a frame" * self._decoder.torn))
        return [from_api(payload) for payload in self._decoder.feed(data)]

    def send(
        self,
        message: Tokens | Failed | Ready | Stats,
        *,
        timeout_s: float = SEND_S,
        blocked: Callable[[], None] = lambda: None,
    ) -> None:
        """Hand the message to the api. PeerBusy when it does not read in time, PeerGone when it ended.

        blocked: called before each wait for it.
        """
        frame = memoryview(pack(message))
        deadline = time.monotonic() + timeout_s
        if not self._sending.acquire(timeout=timeout_s):
            raise PeerBusy(f"another thread has been sending to {PEER} for {timeout_s:g} s")
        try:
            if self._broken:
                raise PeerBroke("a message was cut short earlier: the stream cannot be continued")
            self._broken = True  # until this frame is whole
            if not self._write(frame, deadline, blocked):
                raise PeerBusy(f"{PEER} has read too little for {timeout_s:g} s: it does not turn")
            self._broken = False
        finally:
            self._sending.release()

    def _write(self, frame: memoryview, deadline: float, blocked: Callable[[], None]) -> bool:
        """False when the time was over first."""
        while frame:
            try:
                sent = self._sock.send(frame, socket.MSG_NOSIGNAL)
                frame = frame[sent:]
                continue
            except (BlockingIOError, InterruptedError):
                pass
            except OSError as error:
                raise PeerGone(f"the api is gone: {error}") from error
            blocked()
            if not _ready(self._sock, select.POLLOUT, deadline - time.monotonic()):
                return False
        return True

    def close(self) -> None:
        self._sock.close()


def _ready(sock: socket.socket, event: int, timeout_s: float) -> bool:
    """poll, not select: descriptors over 1023 are normal in a worker."""
    poll = select.poll()
    poll.register(sock, event)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))
