"""What a client gets when there is no answer: the OpenAI error object, with the status and the
headers that make its library act rightly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

STALLED = "engine_stalled"
LOST = "request_lost"
RETRY_AFTER_S = 15  # a restart of an engine
SOON_S = 1


@dataclass(frozen=True, slots=True)
class Failure:
    """A FAILURE as the supervisor told it."""

    id: str
    kind: str
    words: str
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """An explicit end of a request.

    retry False: the client must not send it again by itself (with Retry-After alone the openai
    client silently resubmits twice). retry_after_s: nothing was begun, so it may.
    """

    status: int
    code: str
    message: str
    type: str = "unavailable"
    retry_after_s: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    allow: str = ""  # of a 405: the methods that are served

    def body(self) -> bytes:
        """The error object."""
        error = {"message": self.message, "type": self.type, "code": self.code, "param": None}
        return json.dumps({"error": {**error, **self.extra}}).encode()

    def event(self) -> bytes:
        """The error as one event of a stream."""
        return b"data: " + self.body() + b"\n\n"

    def render(self, *, head_only: bool = False) -> bytes:
        """The whole response; the connection ends with it."""
        body = self.body()
        hint = (
            "x-should-retry: false"
            if self.retry_after_s is None
            else f"retry-after: {self.retry_after_s}"
        )
        allow = f"allow: {self.allow}\r\n" if self.allow else ""
        head = (
            f"HTTP/1.1 {self.status} {_REASONS.get(self.status, 'Error')}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"{allow}{hint}\r\nconnection: close\r\n\r\n"
        )
        return head.encode() + (b"" if head_only else body)


_REASONS = {
    400: "Bad Request",
    408: "Request Timeout",
    405: "Method Not Allowed",
    500: "Internal Server Error",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    502: "Bad Gateway",
    503: "Service Unavailable",
    504: "Gateway Timeout",
}


def stalled(failure: Failure, *, begun: bool) -> Answer:
    """The FAILURE, for a request that was in flight (`begun`) or that comes after it."""
    return Answer(
        503,
        STALLED,
        failure.words,
        STALLED,
        retry_after_s=None if begun else RETRY_AFTER_S,
        extra={"failure_id": failure.id, "kind": failure.kind},
    )


def given_up(engine: str, words: str, failure: Failure | None) -> Answer:
    """Nobody starts that engine again by itself: to come again soon would be in vain."""
    text = (
        f"engine {engine} is given up and not started again until an operator asks for it: {words}"
    )
    if failure is None:
        return Answer(503, "engine_not_ready", text)
    return replace(stalled(failure, begun=True), message=f"{failure.words}; {text}")


def broken(engine: str, how: str) -> Answer:
    """The engine's answer ended before it was complete, and no FAILURE explains it."""
    return Answer(
        503,
        STALLED,
        f"engine {engine} ended this answer before it was complete: {how}",
        STALLED,
        extra={"failure_id": None, "kind": "UNKNOWN_STALL"},
    )


def unavailable(code: str, message: str, *, retry_after_s: float = SOON_S) -> Answer:
    return Answer(503, code, message, retry_after_s=max(1, round(retry_after_s)))


def malformed(engine: str, how: str) -> Answer:
    """The engine answered, but not in HTTP."""
    return Answer(
        502, "bad_upstream", f"engine {engine} answered no valid HTTP: {how}", "server_error"
    )


def bad_request(how: str, status: int = 400) -> Answer:
    return Answer(status, "bad_request", f"no valid HTTP request: {how}", "invalid_request_error")


def not_served(method: str) -> Answer:
    """A method that the gateway does not pass on; any other one is the engine's to judge."""
    found = bad_request(f"{method} is not served", 405)
    return replace(found, allow="DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT")


def overloaded(what: str) -> Answer:
    return Answer(429, "overloaded", what, "overloaded_error", retry_after_s=SOON_S)


def ours() -> Answer:
    text = "the gateway itself failed at this request: its log has the traceback"
    return Answer(500, "gateway_error", text, "server_error")


def body_late(seconds: float) -> Answer:
    return Answer(
        408, "body_late", f"nothing of the request's body for {seconds:g} s", "timeout_error"
    )


def deadline(seconds: float) -> Answer:
    return Answer(
        504,
        "deadline_exceeded",
        f"no complete answer within {seconds:g} s, waiting included",
        "timeout_error",
    )


def lost(seconds: float) -> Answer:
    """Other requests of this engine get bytes, and this one got none for too long."""
    return Answer(
        504,
        LOST,
        f"the engine sent nothing for this request for {seconds:g} s while it served others",
        "timeout_error",
    )


def silent(seconds: float) -> Answer:
    """No byte for too long, and no supervisor that would find out why."""
    return Answer(
        504,
        "engine_silent",
        f"the engine sent nothing for this request for {seconds:g} s, and no supervisor answers",
        "timeout_error",
    )
