"""The API process of vLLM: a beating loop lane, the pending gauge, and the FAILURE to its clients."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

from stallwatch_engine.phasemap import Row
from stallwatch_engine.vllm_plugin.apifail import Guard, Sentry

BEAT_S = 0.1


class ApiSide:
    """Everything that this plugin keeps in an API process. Made once, when an AsyncLLM is built."""

    def __init__(self, lanes: Any) -> None:
        self._lanes = lanes
        self._guards: list[Guard] = []
        self._engines: list[Any] = []
        self._beats: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sentry: Sentry | None = None

    def unfinished(self) -> int:
        """Requests that the engine still owes an answer, over all AsyncLLM of this process."""
        return sum(len(engine.output_processor.request_states) for engine in self._engines)

    def serve(self, engine: Any) -> None:
        """An AsyncLLM runs in the current event loop: beat there, and watch for a failure."""
        if engine in self._engines:
            return
        self._engines.append(engine)
        self._loop = asyncio.get_running_loop()
        if not self._beats:
            task = self._loop.create_task(self._beat())
            self._beats.add(task)
            task.add_done_callback(self._beats.discard)
        if self._sentry is None:
            self._sentry = Sentry(self._lanes.board.failure, self._declared)
            self._sentry.start()

    def guard(self, app: Any) -> Guard:
        """The application with the failure answers around it."""
        made = Guard(app, unfinished=self.unfinished, pending=self._lanes.board.pending)
        self._guards.append(made)
        return made

    async def _beat(self) -> None:
        lane = self._lanes.get("loop")
        while lane is not None:
            lane.enter("loop")
            try:
                self._gauge()
            except Exception:  # another version: a gauge less is no reason for the beat to end
                pass
            await asyncio.sleep(BEAT_S)

    def _gauge(self) -> None:
        if not self._guards:
            self._lanes.board.pending(self.unfinished())
        for guard in self._guards:
            guard.gauge()

    def _declared(self, failure: Any) -> None:
        """From the sentry's thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._fail, failure)

    def _fail(self, failure: Any) -> None:
        # The guards first: from then on nothing that vLLM writes about its death reaches a client
        # that is about to get the real reason.
        for guard in self._guards:
            guard.fail(failure)
        for engine in self._engines:
            _declare_dead(engine, failure)
        if not self._guards:
            self._lanes.board.pending(0)


def _hand_over(lanes: Any) -> None:
    """No event loop runs in this thread: whichever thread will run it is to have the lane."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        try:
            lanes.release("loop")
        except Exception:  # a lane is never worth an engine that does not start
            pass


def _declare_dead(engine: Any, failure: Any) -> None:
    """Make vLLM itself see the death: waiting generators raise, new ones are refused, /health is 503.

    The server does not exit by this: terminate_if_errored also wants the output handler to be done.
    """
    try:
        engine.engine_core.resources.engine_dead = True
        engine.output_processor.propagate_error(_dead_error(failure))
    except Exception:  # another version: the guard has answered the HTTP clients already
        pass


def _dead_error(failure: Any) -> Exception:
    from vllm.v1.engine.exceptions import EngineDeadError  # only ever called inside vLLM

    class EngineStalledError(EngineDeadError):  # type: ignore[misc]
        """The engine was declared failed by its supervisor."""

        def __str__(self) -> str:
            return str(failure.sentence())

    error: Exception = EngineStalledError()
    error.failure = failure  # type: ignore[attr-defined]
    return error


def rows(side: Callable[[], ApiSide]) -> tuple[Row, ...]:
    """The rows of the API process; `side` makes its state at the first use."""

    def init(function: Callable[..., Any], lanes: Any) -> Callable[..., Any]:
        @functools.wraps(function)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  vLLM's own name
            lanes.become_api()
            lane = lanes.get("loop")
            if lane is not None:
                lane.enter("wait_engine", cls="start")
            try:
                function(self, *args, **kwargs)
            finally:
                # Built here, served there: the lane belongs to the thread whose loop is to beat.
                _hand_over(lanes)

        return __init__

    def handler(function: Callable[..., Any], _lanes: Any) -> Callable[..., Any]:
        @functools.wraps(function)
        def _run_output_handler(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = function(self, *args, **kwargs)
            try:
                side().serve(self)
            except Exception:  # no running loop: vLLM calls again at the first request
                pass
            return result

        return _run_output_handler

    def startup(function: Callable[..., Any], lanes: Any) -> Callable[..., Any]:
        @functools.wraps(function)
        async def startup_(self: Any, *args: Any, **kwargs: Any) -> Any:
            if lanes.is_api and not isinstance(self.config.loaded_app, Guard):
                self.config.loaded_app = side().guard(self.config.loaded_app)
            result = await function(self, *args, **kwargs)
            if lanes.is_api and getattr(self, "started", False):
                lanes.board.ready()
            return result

        return startup_

    llm = "vllm.v1.engine.async_llm:AsyncLLM"
    return (
        Row(f"{llm}.__init__", "loop", "wait_engine", "start", wrap=init),
        Row(f"{llm}._run_output_handler", "loop", "loop", wrap=handler),
        # Every front end of vLLM is served by uvicorn; its application is wrapped where uvicorn
        # takes it, because the entry module has imported build_app by name before plugins load.
        Row("uvicorn.server:Server.startup", "loop", "loop", wrap=startup),
    )
