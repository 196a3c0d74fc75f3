"""Liveness, readiness, health: what a probe says, from a state that is never older than said."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from stallwatch.control.service import EngineView, Liveness, Service
from stallwatch.lifecycle.states import SERVING, UNHEALTHY, State, health_word

WAIT_S = 0.05  # a probe waits this long for news, then answers from what is known
MEMORY_ONLY = "kept in memory only"
SILENT_S = 2.0  # a service that does not answer for this long is not live

# The word for several engines is the word of the worst, so that "ready" means all of them.
_WORST_FIRST = (
    State.UNKILLABLE,
    State.EXHAUSTED,
    State.FAILED,
    State.STALLED,
    State.BACKOFF,
    State.STARTING,
    State.STOPPING,
    State.DRAINING,
    State.STOPPED,
    State.SUSPECT,
    State.READY,
)


@dataclass(frozen=True, slots=True)
class Known:
    """The last answer of the service."""

    liveness: Liveness
    engines: tuple[EngineView, ...]
    at: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What a probe says. Lines are (ok, name, why)."""

    ok: bool
    word: str
    lines: tuple[tuple[bool, str, str], ...]

    def text(self, *, verbose: bool) -> str:
        if not verbose:
            return f"{self.word}\n"
        shown = [_line(ok, name, why) for ok, name, why in self.lines]
        return "\n".join([*shown, self.word, ""])


def _line(ok: bool, name: str, why: str) -> str:
    # one check, one line: whatever a reason holds
    why = " ".join("".join(c if c.isprintable() else " " for c in why).split())
    head = f"[+]{name} ok" if ok else f"[-]{name} failed"
    return f"{head}: {why}" if why else head


class Cache:
    """Asks the service in a thread of its own and never makes a probe wait for it.

    A probe under load that queues behind work is the classic false alarm (vLLM #8583, Ray #54070);
    a probe that blocks with the thing it probes is the classic missed one.
    """

    def __init__(self, service: Service, now: Callable[[], float] = time.monotonic) -> None:
        self._service = service
        self._now = now
        self._asked: asyncio.Future[Known] | None = None
        self._asked_at = 0.0
        self._known: Known | None = None

    def _ask(self, loop: asyncio.AbstractEventLoop, answer: asyncio.Future[Known]) -> None:
        found: Known | Exception
        try:
            engines = tuple(self._service.engines())
            found = Known(self._service.liveness(), engines, self._now())
        except Exception as exc:
            found = exc
        with contextlib.suppress(RuntimeError):  # the loop is gone
            loop.call_soon_threadsafe(_settle, answer, found)

    def _start(self) -> asyncio.Future[Known]:
        # A daemon thread, one at a time, and no executor: those are joined at exit, and a service
        # that blocks would then keep the whole process from ending.
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Known] = loop.create_future()
        args = (loop, answer)
        threading.Thread(target=self._ask, args=args, name="stallwatch-probe", daemon=True).start()
        return answer

    async def look(self) -> tuple[Known | None, float]:
        """What is known, and how long the service has been silent (0: it answered)."""
        if self._asked is None:
            self._asked_at = self._now()
            self._asked = self._start()
        asked = self._asked
        # the first probe has nothing to fall back on, so it may wait longer
        await asyncio.wait({asked}, timeout=WAIT_S if self._known else SILENT_S)
        if not asked.done():
            return self._known, self._now() - self._asked_at
        self._asked = None if self._asked is asked else self._asked
        if asked.exception() is not None:
            return None, 0.0
        self._known = asked.result()
        return self._known, 0.0


def _settle(answer: asyncio.Future[Known], found: Known | Exception) -> None:
    if answer.cancelled():
        return
    if isinstance(found, Exception):
        answer.set_exception(found)
    else:
        answer.set_result(found)


def _silence(known: Known | None, silent_s: float) -> str:
    if known is None and silent_s == 0.0:
        return "the service raised an error"
    if known is None or silent_s > SILENT_S:
        return f"no answer for {silent_s:.1f} s"
    return ""


def livez(known: Known | None, silent_s: float) -> Answer:
    """Our own loops, and nothing of any engine."""
    silence = _silence(known, silent_s)
    if silence or known is None:
        return Answer(ok=False, word="not live", lines=((False, "service", silence),))
    live = known.liveness
    lines = [(True, f"loop/{name}", f"turned {age:.1f} s ago") for name, age in live.loops]
    if not live.live:
        lines.append((False, "loops", live.detail or "a loop does not turn"))
    return Answer(live.live, "live" if live.live else "not live", tuple(lines))


def _can_serve(view: EngineView) -> bool:
    return view.ready and view.state in SERVING and view.role != "gateway"


def _engine_line(view: EngineView, ok: bool, *, reasons: bool) -> tuple[bool, str, str]:
    word = health_word(view.state)
    why = f"{word}: {view.reason}" if reasons and view.reason and not ok else word
    return ok, f"engine/{view.name}", why


def readyz(known: Known | None, silent_s: float, *, reasons: bool = True) -> Answer:
    """Whether an engine can serve."""
    silence = _silence(known, silent_s)
    if silence or known is None:
        return Answer(ok=False, word="not ready", lines=((False, "service", silence),))
    able = [_can_serve(view) for view in known.engines]
    lines = [
        _engine_line(view, ok, reasons=reasons)
        for view, ok in zip(known.engines, able, strict=True)
    ]
    return Answer(any(able), "ready" if any(able) else "not ready", tuple(lines))


def word_of(engines: Sequence[EngineView]) -> str:
    """The word of the worst engine."""
    if not engines:
        return health_word(State.STOPPED)
    return health_word(min((view.state for view in engines), key=_WORST_FIRST.index))


def healthz(known: Known | None, silent_s: float, *, reasons: bool = True) -> Answer:
    """Not live, or an engine that will not come back by itself: 503. Else 200 with a word."""
    alive = livez(known, silent_s)
    if known is None or not alive.ok:
        return alive
    oks = [view.state not in UNHEALTHY for view in known.engines]
    lines = [
        _engine_line(view, ok, reasons=reasons) for view, ok in zip(known.engines, oks, strict=True)
    ]
    first = ((True, "loops", ""), *_reports(known.liveness, reasons=reasons))
    return Answer(all(oks), word_of(known.engines), (*first, *lines))


def _reports(live: Liveness, *, reasons: bool) -> tuple[tuple[bool, str, str], ...]:
    """A line only when the disk does not take reports. That breaks no engine: no probe fails."""
    if not live.reports:
        return ()
    return ((False, "reports", MEMORY_ONLY + (f" ({live.reports})" if reasons else "")),)


def _respond(answer: Answer, request: Request) -> Response:
    verbose = request.query_params.get("verbose", "false") not in ("false", "0")
    return PlainTextResponse(answer.text(verbose=verbose), 200 if answer.ok else 503)


def router(cache: Cache, *, reasons: bool) -> APIRouter:
    """The three probes. reasons False: nothing that may name a file or a person."""
    routes = APIRouter(tags=["probes"], default_response_class=PlainTextResponse)
    texts: dict[int | str, dict[str, Any]] = {503: {"description": "it is not so"}}

    @routes.get("/livez", summary="Do the supervisor's own loops turn?", responses=texts)
    async def _livez(request: Request) -> Response:
        answer = livez(*await cache.look())
        if not reasons:
            kept = tuple((ok, name, why if ok else "") for ok, name, why in answer.lines)
            answer = Answer(answer.ok, answer.word, kept)
        return _respond(answer, request)

    @routes.get("/readyz", summary="Can an engine serve?", responses=texts)
    async def _readyz(request: Request) -> Response:
        return _respond(readyz(*await cache.look(), reasons=reasons), request)

    @routes.get("/healthz", summary="Is anything broken?", responses=texts)
    async def _healthz(request: Request) -> Response:
        return _respond(healthz(*await cache.look(), reasons=reasons), request)

    return routes
