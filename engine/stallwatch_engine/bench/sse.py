"""Server-sent events out of a body in pieces of any size; bounded. Pure."""

from __future__ import annotations

from collections.abc import Iterator

MAX_EVENT = 1 << 20  # bytes; a token's event has a few hundred
DONE = "[DONE]"


class Oversized(Exception):
    """The server sent an event of more than MAX_EVENT bytes."""


class EventStream:
    """`feed` it the body; it yields (event, data) of each whole event. Comments and ids are dropped."""

    def __init__(self) -> None:
        self._rest = b""
        self._event = ""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> Iterator[tuple[str, str]]:
        """The events that this piece completes. Raises Oversized."""
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) + self._size > MAX_EVENT:
            raise Oversized
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if not line:
                if self._data:
                    yield self._event, b"\n".join(self._data).decode("utf-8", "replace")
                self._event, self._data, self._size = "", [], 0
            else:
                self._field(line)

    @property
    def partial(self) -> bool:
        """Something was begun and not ended: as at the end of a body that was cut."""
        return bool(self._rest or self._data)

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._size += len(value) + 1  # empty fields are kept too
            if self._size > MAX_EVENT:
                raise Oversized
            self._data.append(value)
        elif name == b"event":
            self._event = value[:64].decode("utf-8", "replace")
