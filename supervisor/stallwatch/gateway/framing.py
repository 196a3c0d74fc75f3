"""Where a message body ends, without taking it apart: bytes go through as they came.

A framing object is fed what was received and says what may be passed on. The end of a chunked body
(`terminator`) is kept back, so that whoever relays it can still decide to break the body off.
"""

from __future__ import annotations

import re

MAX_LINE = 4096  # a chunk-size line with its extensions
MAX_TRAILERS = 16 * 1024
MAX_WHOLE = 64 * 1024  # a chunk is kept back until it is complete up to this size
TAIL = 64
EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;[^\r\n\x00]*)?")
_TRAILERS = re.compile(rb"(?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\r\n\x00]*\r\n)*")


class Malformed(Exception):
    """The peer does not speak HTTP/1.1: this message has no trustworthy end.

    `passed`: what came before the mistake in the same bytes.
    """

    passed = b""


class Framing:
    """A body; this one has none. `rest` is what was received after its end."""

    def __init__(self) -> None:
        self.done = True
        self.tail = b""  # the last bytes of the payload, where somebody asked for them
        self.terminator = b""
        self.rest = b""
        self.safe = 0  # of the bytes that feed() returned: up to the end of the last whole event

    def feed(self, data: bytes) -> bytes:
        """What of `data` (and of what was kept back) belongs to the body and may pass."""
        self.rest += data
        return b""

    def close(self) -> bool:
        """The peer closed: True if that is how this body ends."""
        return self.done


class Length(Framing):
    """Content-Length. events True: `tail` and `safe` are kept."""

    def __init__(self, length: int, *, events: bool = False) -> None:
        super().__init__()
        self.left = length
        self._events = events
        self.done = length == 0

    def feed(self, data: bytes) -> bytes:
        if len(data) > self.left:
            data, self.rest = data[: self.left], self.rest + data[self.left :]
        self.left -= len(data)
        self.done = not self.left
        if self._events:
            self.tail = (self.tail + data)[-TAIL:]
            self.safe = _whole_events(data, self.tail)
        return data


class UntilClose(Framing):
    """Everything until the connection ends: nobody can tell an end from a break."""

    def __init__(self) -> None:
        super().__init__()
        self.done = False

    def feed(self, data: bytes) -> bytes:
        self.tail = (self.tail + data)[-TAIL:]
        self.safe = _whole_events(data, self.tail)
        return data

    def close(self) -> bool:
        self.done = True
        return True


def _whole_events(data: bytes, tail: bytes) -> int:
    """How much of `data`, after which the payload ends in `tail`, ends with a whole event."""
    if tail.endswith(EVENT_ENDS):
        return len(data)
    at = data.rfind(b"\n\n")
    return at + 2 if at >= 0 else 0


class Chunked(Framing):
    """Transfer-Encoding: chunked.

    whole True: only complete chunks pass (up to MAX_WHOLE each), and `tail` is kept; then whoever
    relays can put a chunk of his own between two of them at any time.
    """

    def __init__(self, *, whole: bool) -> None:
        super().__init__()
        self.done = False
        self.inside = False  # the bytes passed so far end inside a chunk
        self._whole = whole
        self._kept = b""
        self._left = 0
        self._good_tail = b""
        self._good = 0  # of the bytes at hand: up to the end of the last whole chunk

    def feed(self, data: bytes) -> bytes:
        if self.done:
            self.rest += data
            return b""
        if self._kept:
            data, self._kept = self._kept + data, b""
        self.safe, self._good, inside = 0, 0, self.inside
        self._good_tail = self.tail
        try:
            return self._feed(data)
        except Malformed as error:
            error.passed = data[: self._good]
            self.inside = inside and not self._good
            self.tail = self._good_tail
            raise

    def _feed(self, data: bytes) -> bytes:
        at, size = 0, len(data)
        while True:
            if self.inside:
                take = min(self._left, size - at)
                if self._whole:
                    self.tail = (self.tail + data[max(at, at + take - TAIL) : at + take])[-TAIL:]
                at += take
                self._left -= take
                if self._left or size - at < 2:
                    break
                if data[at : at + 2] != b"\r\n":
                    raise Malformed("a chunk is longer than it said")
                at += 2
                self.inside, self._good, self._good_tail = False, at, self.tail
                if self._whole and self.tail.endswith(EVENT_ENDS):
                    self.safe = at
            if (begin := self._begin(data, at)) < 0:
                break
            if self.done:
                self.rest = data[begin:]
                return data[:at]
            if self._whole and begin + self._left + 2 > size and self._left <= MAX_WHOLE:
                break
            at, self.inside = begin, True
        self._kept = data[at:]
        return data[:at]

    def _begin(self, data: bytes, at: int) -> int:
        """Where the payload of the chunk at `at` begins, or what follows the body; -1: not yet."""
        end = data.find(b"\r\n", at, at + MAX_LINE)
        if end < 0:
            if len(data) - at >= MAX_LINE:
                raise Malformed("a chunk-size line without end")
            return -1
        found = _SIZE.fullmatch(data, at, end)
        if found is None:
            raise Malformed("no chunk size where one must be")
        self._left = int(found[1], 16)
        if self._left:
            return end + 2
        stop = data.find(b"\r\n\r\n", end)
        if stop < 0:
            if len(data) - at > MAX_TRAILERS:
                raise Malformed("trailers without end")
            return -1
        if _TRAILERS.fullmatch(data, end + 2, stop + 2) is None and stop > end:
            raise Malformed("a trailer that is no header")
        self.done, self.terminator = True, data[at : stop + 4]
        return stop + 4


def chunk(payload: bytes) -> bytes:
    """One chunk."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)
