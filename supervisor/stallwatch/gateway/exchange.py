"""One request and its answer, between a client's connection and an upstream's.

Bytes go from callback to callback. What needs waiting (a replica, a FAILURE's id, a second try)
is in `serve`, which gets each attempt's end through a future.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from stallwatch.gateway import ends, said
from stallwatch.gateway.errors import Answer, Failure
from stallwatch.gateway.framing import Chunked, Framing, Length, Malformed, UntilClose, chunk
from stallwatch.gateway.head import Request, Response, end_of_head, parse_response

if TYPE_CHECKING:
    from stallwatch.gateway.client import Client
    from stallwatch.gateway.upstream import Upstream

RETAINED = 4 << 20  # a longer request body is not kept, so it is never sent twice
UNSENT = 256 << 10  # kept of a request body while there is nobody to send it to
COLLECTED = 256 << 10  # a JSON answer up to this size is passed on once it is complete
HELD = 256 << 10  # of an event that is not complete yet
FED_LEAST = 16 << 10  # of a request body; a client that sends less in its time sends too slowly
COMPUTING = (b"POST", b"PUT", b"PATCH")  # requests with something to compute
_STREAM = re.compile(rb'"stream"\s*:\s*true')


@dataclass(slots=True)
class Budget:
    """Bytes of request bodies that all exchanges together may keep for a second attempt."""

    most: int = 256 << 20
    used: int = 0


class End(Enum):
    """How one attempt ended."""

    COMPLETE = "complete"
    REFUSED = "refused"  # no connection: nothing was sent
    LOST = "lost"  # the upstream's connection ended too early
    MALFORMED = "malformed"
    TROUBLED = "troubled"  # the engine's own error, complete and held back: a FAILURE may be why
    TOLD = "told"  # the same, and it names the FAILURE itself
    FAILED = "failed"  # the supervisor declared a FAILURE
    ENDED = "ended"  # by a rule of the gateway: `answer` says which
    CLIENT_GONE = "client gone"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of an attempt, with what is known of its cause."""

    end: End
    how: str = ""
    failure: Failure | None = None
    answer: Answer | None = None


class Exchange:
    """All callbacks are of one event loop; none of them blocks."""

    __slots__ = (
        "_collected", "_fed", "_held", "_incoming", "_kept_bytes", "_latest", "_streams", "_unsaid", "began_s",
        "begun", "client", "ended", "engine", "failure_id", "fed_s", "heard", "held_back_s", "incarnation",
        "kept", "last_s", "request", "response", "sent_s", "tunnel", "upstream",
    )  # fmt: skip

    def __init__(self, client: Client, request: Request) -> None:
        self.client = client
        self.request = request
        self.response: Response | None = None
        self.upstream: Upstream | None = None
        self.ended: asyncio.Future[Outcome] = client.loop.create_future()
        self.kept: list[bytes] | None = []  # the request body so far; None: too long to keep
        self.began_s = self.last_s = time.monotonic()
        self._kept_bytes = 0
        self.fed_s = self.began_s  # when the client last had sent enough
        self._fed = 0  # bytes since then
        self.held_back_s = 0.0  # since when the client takes nothing; 0: it takes
        self.begun = False  # the client has got bytes
        self.heard = False  # the upstream has sent bytes
        self.tunnel = False
        self.engine = ""
        self.incarnation = 0  # of the engine that the present attempt was sent to
        self.failure_id = ""  # of a FAILURE that the engine told its client itself
        self._streams: bool | None = None
        self._latest = b""  # the last bytes of the answer, as they came
        self._incoming = b""
        self._collected: list[bytes] | None = None
        self._unsaid = b""
        self._held = b""
        self.sent_s = self.began_s  # when the present attempt was sent

    # -- from the client -----------------------------------------------------------------------

    def from_client(self, data: bytes) -> None:
        """More of the request's body. Raises Malformed."""
        if self.tunnel:
            if self.upstream is not None:
                self.upstream.write(data)
            return
        framing = self.request.framing
        passed = framing.feed(data)
        if framing.done:
            passed += framing.terminator
            self.client.put_back(framing.rest)
            framing.rest = b""
        self._fed += len(data)
        self.last_s = time.monotonic()
        if framing.done or self._fed >= FED_LEAST:
            self.fed_s, self._fed = self.last_s, 0
        if self.kept is not None and passed:
            self._keep(passed)
        if self.upstream is not None and passed:
            self.upstream.write(passed)

    def _keep(self, passed: bytes) -> None:
        assert self.kept is not None
        budget = self.client.budget
        self.kept.append(passed)
        self._kept_bytes += len(passed)
        budget.used += len(passed)
        if self.upstream is None:
            if self._kept_bytes > UNSENT or budget.used > budget.most:
                self.client.pause()
        elif self._kept_bytes > RETAINED or budget.used > budget.most:
            self._streams = _STREAM.search(b"".join(self.kept)) is not None
            self.forget()

    def forget(self) -> None:
        """Keep the request's body no longer."""
        self.kept = None
        self.client.budget.used -= self._kept_bytes
        self._kept_bytes = 0

    def may_repeat(self) -> bool:
        """Its client has got nothing of an answer, and the request can be sent once more."""
        return not self.begun and self.kept is not None and not self.tunnel

    def unheard(self) -> bool:
        """The same, and the engine has sent nothing either."""
        return not self.heard and self.may_repeat()

    def again(self) -> None:
        """A new attempt is about to begin. What the last one's connection still does is not its own."""
        self.drop_upstream()
        self.response = self._collected = None
        self.heard, self.failure_id = False, ""
        self._incoming = self._held = self._unsaid = self._latest = b""
        self.ended = self.client.loop.create_future()
        if self.client.gone:
            self.end(Outcome(End.CLIENT_GONE))

    def attach(self, upstream: Upstream) -> None:
        """Send the request, as far as it is known, over this connection."""
        upstream.exchange, self.upstream = self, upstream
        self.last_s = self.sent_s = time.monotonic()
        if upstream.closed:
            self.upstream = None
            self.end(Outcome(End.LOST, "connection closed"))
            return
        upstream.write(self.request.render() + b"".join(self.kept or ()))
        self.client.resume()

    def streams(self) -> bool:
        """Whether the client asked for a stream (or gets one): then every token is a sign of life."""
        if self.response is not None:
            return self.response.sse
        if self._streams is None:
            self._streams = _STREAM.search(b"".join(self.kept or ())) is not None
        return self._streams

    # -- from the upstream ---------------------------------------------------------------------

    def from_upstream(self, data: bytes) -> None:
        """More of the answer."""
        if self.ended.done():
            return
        self.heard = True
        self.last_s = now = time.monotonic()
        if self.upstream is not None:
            self.upstream.pool.last_s = now
        if self.tunnel:
            self.client.write(data)
            return
        try:
            if self.response is None:
                data = self._head(data)
                if self.response is None or self.tunnel:
                    return
            self._body(data)
        except Malformed as error:
            if error.passed and self.response is not None:
                self._pass(error.passed, self.response)
            self.end(Outcome(End.MALFORMED, str(error)))

    def upstream_closed(self, how: str) -> None:
        """The connection ended; for some bodies that is their end."""
        response = self.response
        if self.tunnel:
            self.end(Outcome(End.COMPLETE))
            self.client.finish(close=True)
        elif response is not None and response.framing.close() and not self.ended.done():
            self._complete(response)
        else:
            self.end(Outcome(End.LOST, how))

    def end(self, outcome: Outcome) -> None:
        """The attempt is over; later ones of its events mean nothing."""
        if not self.ended.done():
            self.ended.set_result(outcome)

    def _head(self, data: bytes) -> bytes:
        """Read heads until the final one; returns what of its body came with it."""
        data = self._incoming + data
        while (at := end_of_head(data)) > 0:
            request = self.request
            response = parse_response(data[:at], request.method, upgrade=request.upgrade)
            data = data[at:]
            if response.status == 101:
                self._open_tunnel(response, data)
                return b""
            if response.status < 200:
                if not self.request.old:
                    self.client.write(response.render(close=False, old=False))
                continue
            self._final(response)
            return data
        self._incoming = data
        return b""

    def _final(self, response: Response) -> None:
        self.response = response
        self._incoming = b""
        small = response.length is not None and response.length <= COLLECTED
        if small and (response.json or self._doubtful(response)) and not response.framing.done:
            self._collected = []
            return
        self._begin(response)

    def _doubtful(self, response: Response) -> bool:
        """An error that may be the first sign of a FAILURE."""
        return said.doubtful(response) and self.request.method in COMPUTING

    def _begin(self, response: Response, body: bytes = b"") -> None:
        close = self._closes(response)
        self.begun = True
        self.client.write(response.render(close=close, old=self.request.old) + body)

    def _closes(self, response: Response) -> bool:
        return (
            self.request.close
            or isinstance(response.framing, UntilClose)
            or not self.request.framing.done
            or self.client.closing
        )

    def _body(self, data: bytes) -> None:
        response = self.response
        assert response is not None
        framing = response.framing
        if response.sse and said.stalled(data):
            if told := said.failure_id(data):
                self.failure_id = told  # the engine was first
            elif said.knows_no_id(
                data
            ):  # it was failed and knows no id: one of ours takes its place
                self._unsaid = data
                self.end(Outcome(End.LOST, "it says itself that it was failed"))
                return
        self._latest = data or self._latest
        if data and (passed := framing.feed(data)):
            self._pass(passed, response)
        if framing.done:
            self._complete(response)

    def _pass(self, passed: bytes, response: Response) -> None:
        if self._collected is not None:
            self._collected.append(passed)
            return
        if response.sse:
            safe = response.framing.safe
            if safe < len(passed) or self._held:
                passed, self._held = self._whole_events(passed, safe)
        if passed:
            self.client.write(passed)

    def _whole_events(self, passed: bytes, safe: int) -> tuple[bytes, bytes]:
        """What may go now, and what is kept back until its event is complete (up to a limit)."""
        passed, before = self._held + passed, len(self._held)
        if len(passed) > HELD:
            return passed, b""
        cut = before + safe if safe else 0
        return passed[:cut], passed[cut:]

    def _complete(self, response: Response) -> None:
        """The framing is at its end. An event stream must say itself that it is over."""
        framing = response.framing
        if (
            response.sse
            and response.status == 200
            and not ends.complete(self.request.path, framing.tail)
        ):
            self.end(Outcome(End.LOST, "the stream ended without [DONE]"))
            return
        if self._collected is not None:
            collected, self._collected = b"".join(self._collected), None
            told = said.failure_id(collected) if response.status == 503 else ""
            self.failure_id = told
            if self._doubtful(response) and (told or not said.refuses(response, collected)):
                self._unsaid = collected
                self._let_go(response)
                how = f"status {response.status}"
                self.end(Outcome(End.TOLD if told else End.TROUBLED, how))
                return
            self._begin(response, collected)
        if last := self._held + framing.terminator:
            self._held = b""
            self.client.write(last)
        self.end(Outcome(End.COMPLETE))
        self._let_go(response)
        self.client.finish(close=self._closes(response))

    def _let_go(self, response: Response) -> None:
        """The upstream has said all: it may be used by others."""
        upstream, self.upstream = self.upstream, None
        if upstream is not None:
            rest = response.framing.rest
            upstream.release(reusable=not (response.close or rest or not self.request.framing.done))

    def says_stalled(self) -> bool:
        """The engine's own error, which is held back, says that it was failed."""
        return said.stalled(self._unsaid)

    def saw_end(self) -> bool:
        """The client has the whole stream, though not its last chunk: some hang up at `[DONE]`."""
        response = self.response
        return response is not None and response.sse and ends.done(response.framing.tail)

    def pass_on(self) -> None:
        """The engine's own error is the answer, as it came."""
        response = self.response
        assert response is not None
        self._begin(response, self._unsaid)
        self.client.finish(close=self._closes(response))

    def _open_tunnel(self, response: Response, data: bytes) -> None:
        self.tunnel = self.begun = True
        self.client.write(response.render(close=False, old=False) + data)
        self.client.resume()

    # -- an explicit end -----------------------------------------------------------------------

    def answer(self, answer: Answer) -> None:
        """The one answer that is not the engine's. Nothing of the engine's comes after it."""
        self.drop_upstream()
        if not self.begun:
            self.client.finish_with(answer.render(head_only=self.request.method == b"HEAD"))
            return
        response = self.response
        framing = response.framing if response is not None else None
        if self.tunnel or response is None or framing is None:
            self.client.break_off(b"", reset=True)
            return
        last = b""
        stream = response.sse and response.status == 200 and self._clean(framing.tail)
        if stream and not said.stalled(self._latest):  # the engine has not said it itself
            last = _last_event(framing, answer.event())
        self.client.break_off(last, reset=isinstance(framing, UntilClose) and not last)

    def _clean(self, tail: bytes) -> bool:
        """The client has whole events only: the incomplete one, if any, was held back."""
        return bool(self._held) or ends.between_events(tail)

    def drop_upstream(self) -> None:
        """Abort the upstream's request, at once."""
        upstream, self.upstream = self.upstream, None
        if upstream is not None:
            upstream.abort()


def _last_event(framing: Framing, event: bytes) -> bytes:
    """The event as the last of a body of this kind, nothing where it would not be read as one.

    A body of a known length must stay too short: filled up, it would count as complete.
    """
    if isinstance(framing, Chunked):
        return b"" if framing.inside else chunk(event)
    if isinstance(framing, Length):
        return event if len(event) < framing.left else b""
    return event
