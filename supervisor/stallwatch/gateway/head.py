"""Heads of requests and responses: judged by h11, passed on as they were written.

Only what belongs to one connection is taken out; names keep their case, duplicates their order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import h11

from stallwatch.gateway.framing import Chunked, Framing, Length, Malformed, UntilClose

MAX_HEAD = 64 * 1024
Headers = list[tuple[bytes, bytes]]

_OF_ONE_CONNECTION = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"upgrade"}
)
_NEVER_A_BODY = (204, 304)
_ANSWERED = {
    method: h11.Request(method=method, target="/", headers=[("host", "x")])
    for method in (b"GET", b"HEAD", b"POST")
}
_UPGRADE = h11.Request(method="GET", target="/", headers=[("host", "x"), ("upgrade", "websocket")])


@dataclass(slots=True)
class Request:
    """A request head. `headers` are what goes upstream."""

    method: bytes
    target: bytes
    headers: Headers
    framing: Framing
    old: bool  # HTTP/1.0: no chunks, and the connection ends with the answer
    close: bool  # the client wants the connection closed afterwards
    upgrade: bool  # to a WebSocket
    seconds: float | None = None  # the deadline that the client itself asked for

    @property
    def path(self) -> bytes:
        return self.target.partition(b"?")[0]

    def render(self) -> bytes:
        """The head as the upstream gets it."""
        version = b"1.0" if self.old else b"1.1"
        first = b"%b %b HTTP/%b\r\n" % (self.method, self.target, version)
        return first + _lines(self.headers)


@dataclass(slots=True)
class Response:
    """A response head. `framing` is how its body ends on the upstream's connection."""

    status: int
    headers: Headers
    framing: Framing
    reason: bytes
    sse: bool
    json: bool
    length: int | None
    close: bool  # the upstream will close

    def render(self, *, close: bool, old: bool) -> bytes:
        """The head as the client gets it; `close`: nothing else will come on this connection."""
        version = b"1.0" if old else b"1.1"
        first = b"HTTP/%b %d %b\r\n" % (version, self.status, self.reason)
        extra: Headers = [(b"Connection", b"close")] if close else []
        return first + _lines(self.headers + extra)


def _lines(headers: Headers) -> bytes:
    return b"".join([b"%b: %b\r\n" % pair for pair in headers]) + b"\r\n"


def end_of_head(data: bytes | bytearray) -> int:
    """Where the head ends, -1: not yet. Raises Malformed beyond MAX_HEAD."""
    end = data.find(b"\r\n\r\n", 0, MAX_HEAD)
    if end < 0 and len(data) >= MAX_HEAD:
        raise Malformed(f"a head of more than {MAX_HEAD} bytes")
    return end + 4 if end >= 0 else -1


def parse_request(raw: bytes) -> Request:
    """Raises Malformed for whatever h11 refuses, and for two lengths of one body."""
    judge = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
    event = _event(judge, raw)
    if not isinstance(event, h11.Request):
        raise Malformed("no request")
    raw_items = [(bytes(n), bytes(v)) for n, v in event.headers.raw_items()]
    words = connection_words(raw_items)
    low = {name.lower(): value for name, value in raw_items}
    old = event.http_version < b"1.1"
    chunked = b"transfer-encoding" in low
    if chunked and (b"content-length" in low or old):
        raise Malformed("a body with two lengths")
    upgrade = b"upgrade" in words and low.get(b"upgrade", b"").lower() == b"websocket"
    headers = _kept(raw_items, words)
    if upgrade:
        headers += [(b"Connection", b"Upgrade"), (b"Upgrade", b"websocket")]
    elif old:
        headers.append((b"Connection", b"close"))
    framing: Framing = (
        Chunked(whole=False) if chunked else Length(int(low.get(b"content-length", b"0")))
    )
    close = b"close" in words or old
    seconds = _seconds(low.get(b"x-stallwatch-deadline", b""))
    return Request(event.method, event.target, headers, framing, old, close, upgrade, seconds)


def parse_response(raw: bytes, method: bytes, *, upgrade: bool = False) -> Response:
    """Raises Malformed. 1xx included; 101 has no body of HTTP at all."""
    judge = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)
    judge.send(_UPGRADE if upgrade else _ANSWERED.get(method, _ANSWERED[b"POST"]))
    event = _event(judge, raw)
    if not isinstance(event, h11.Response | h11.InformationalResponse):
        raise Malformed("no response")
    items = [(bytes(n), bytes(v)) for n, v in event.headers.raw_items()]
    words = connection_words(items)
    low = {name.lower(): value for name, value in items}
    status = event.status_code
    kind = low.get(b"content-type", b"").lower()
    length = int(low[b"content-length"]) if b"content-length" in low else None
    framing: Framing
    sse = kind.startswith(b"text/event-stream")
    if method == b"HEAD" or status in _NEVER_A_BODY or status < 200:
        framing = Framing()
    elif b"transfer-encoding" in low:
        framing = Chunked(whole=sse)
        if length is not None:  # RFC 9112 6.3: the chunks count, and the length must not pass
            items = [pair for pair in items if pair[0].lower() != b"content-length"]
    elif length is not None:
        framing = Length(length, events=sse)
    else:
        framing = UntilClose()
    return Response(
        status=status,
        headers=items if status == 101 else _kept(items, words),
        framing=framing,
        reason=bytes(event.reason),
        sse=sse,
        json=kind.startswith(b"application/json"),
        length=length,
        close=b"close" in words or event.http_version < b"1.1",
    )


def _event(judge: h11.Connection, raw: bytes) -> object:
    judge.receive_data(raw)
    try:
        event = judge.next_event()
    except h11.RemoteProtocolError as error:
        raise Malformed(str(error)) from error
    if judge.trailing_data[0]:  # h11 takes bare line feeds, and so an earlier end than ours
        raise Malformed("an empty line inside the head")
    return event


def connection_words(items: Headers) -> frozenset[bytes]:
    """The words of every Connection header."""
    values = b",".join(value for name, value in items if name.lower() == b"connection")
    return frozenset(word.strip().lower() for word in values.split(b","))


def _kept(items: Headers, words: frozenset[bytes]) -> Headers:
    gone = _OF_ONE_CONNECTION | (words - {b"transfer-encoding", b"content-length", b"host"})
    return [pair for pair in items if pair[0].lower() not in gone]


_DURATION = re.compile(rb"(\d{1,6}(?:\.\d{1,3})?)s?")


def _seconds(value: bytes) -> float | None:
    found = _DURATION.fullmatch(value.strip())
    return float(found[1]) if found else None
