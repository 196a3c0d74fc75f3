"""Frames on a byte stream: four bytes of length, big-endian, then that many bytes of JSON."""

from __future__ import annotations

from collections.abc import Iterator

MAX_FRAME = 8 << 20  # the longest prompt as JSON integers is under 3 MiB
HEADER = 4


class WireError(Exception):
    """The conversation between api and worker has ended; the connection is of no more use."""


class PeerBroke(WireError):
    """The other side said something that is no message: its process is to be replaced."""


class PeerGone(WireError):
    """The other side closed the connection, or its process ended."""


class PeerBusy(WireError):
    """The other side did not read in time."""


def encode(payload: bytes) -> bytes:
    """The payload as one frame. ValueError when no receiver would take it."""
    if not 0 < len(payload) <= MAX_FRAME:
        raise ValueError(f"a frame of {len(payload)} bytes: 1 to {MAX_FRAME} are allowed")
    return len(payload).to_bytes(HEADER, "big") + payload


class FrameDecoder:
    """Cuts a byte stream into payloads. Holds at most one unfinished frame."""

    def __init__(self, max_frame: int = MAX_FRAME) -> None:
        self._max = max_frame
        self._buffer = bytearray()

    @property
    def torn(self) -> bool:
        """True when the stream stands inside a frame."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The payloads that are complete now; to be read to the end.

        PeerBroke on a length nobody may send, after the payloads before it.
        """
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= HEADER:
                size = int.from_bytes(self._buffer[start : start + HEADER], "big")
                if not 0 < size <= self._max:
                    start = len(self._buffer)
                    raise PeerBroke(f"a frame of {size} bytes: 1 to {self._max} are allowed")
                end = start + HEADER + size
                if len(self._buffer) < end:
                    break
                payload = bytes(self._buffer[start + HEADER : end])
                start = end
                yield payload
        finally:
            del self._buffer[:start]
