"""The api's heartbeats: a beating loop lane, the pending gauge, and the supervisor's FAILURE."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from stallwatch_engine.api.answer import ANSWER_S
from stallwatch_engine.api.client import EngineClient
from stallwatch_engine.vllm_plugin.apifail import Sentry

BEAT_S = 0.1
FLUSH_S = 0.005  # a turn of the loop or two: sockets are written at the end of one


class Lane(Protocol):
    def enter(self, phase: str, /) -> None: ...


class Board(Protocol):
    """What is used of stallwatch.heartbeat's board."""

    @property
    def attached(self) -> bool: ...
    def lane(self, name: str) -> Any: ...
    def pending(self, n: int) -> None: ...
    def ready(self) -> None: ...
    def failure(self) -> Any: ...


class Heart:
    """Made and used in the loop's thread; the board is watched from a thread of its own, which sees
    the FAILURE while the loop is busy.
    """

    def __init__(self, board: Board, client: EngineClient) -> None:
        self._board = board
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failing = False
        self._sentry = Sentry(board.failure, self._declared)

    def start(self) -> None:
        self._sentry.start()
        self._spawn(self._beat())

    async def stop(self) -> None:
        self._sentry.stop()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _beat(self) -> None:
        lane: Lane = self._board.lane("loop")
        said_ready = False
        while True:
            lane.enter("loop")
            if not self._failing:  # then the gauge counts answers still to be written
                self._board.pending(len(self._client.ledger))
            if not said_ready and self._client.ready.is_set():
                said_ready = True
                self._board.ready()
            await asyncio.sleep(BEAT_S)

    def _declared(self, failure: Any) -> None:
        """From the sentry's thread. The loop may be gone already, when the process is ending."""
        call: Callable[[Any], None] = self._fail
        try:
            self._loop.call_soon_threadsafe(call, failure)
        except RuntimeError:
            pass

    def _fail(self, failure: Any) -> None:
        self._failing = True
        self._board.pending(self._client.declare(failure))
        self._spawn(self._settle_gauge())

    async def _settle_gauge(self) -> None:
        """Zero on the gauge lets the supervisor kill: only after the answers have been written."""
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._client.all_written.wait()
        except TimeoutError:
            pass
        await asyncio.sleep(FLUSH_S)
        self._board.pending(0)
