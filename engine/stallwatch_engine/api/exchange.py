"""One request between its arrival and its one answer, as its HTTP handler sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from stallwatch_engine.api.generation import Delta, Generation
from stallwatch_engine.api.ledger import Answer

# Text that a streaming client has not read yet, counted in tokens and likely tokens shown with
# them. The connection's own buffers fill before anything piles up here.
MAX_UNREAD = 16384


class Exchange:
    """Output goes in by `put`, the answer by `settle`; the handler takes both out by `next`."""

    def __init__(
        self, request: int, generation: Generation, *, prompt_tokens: int, streaming: bool
    ) -> None:
        self.id = request
        self.generation = generation
        self.prompt_tokens = prompt_tokens
        self.streaming = streaming
        self.answer: Answer | None = None
        self.began = asyncio.get_running_loop().time()
        self.first_token_s: float | None = None
        self._unread = Delta()
        self._wake = asyncio.Event()
        self._on_settled: list[Callable[[Answer], None]] = []

    def put(self, delta: Delta) -> None:
        """Output that came. What the client has not taken yet is one piece, however slow it is."""
        if self.first_token_s is None and delta.tokens:
            self.first_token_s = asyncio.get_running_loop().time() - self.began
        self._unread.add(delta)
        self._wake.set()

    @property
    def overflows(self) -> bool:
        """True when a streaming client has left more unread than is kept for it."""
        shown = sum(len(info.top) for info in self._unread.logprobs)
        return self.streaming and self._unread.tokens + shown > MAX_UNREAD

    def settle(self, answer: Answer) -> None:
        """The one answer, as the ledger decided. An error takes the place of unread output."""
        self.answer = answer
        if answer.error is not None:
            self._unread = Delta()
        self._wake.set()
        for call in self._on_settled:
            call(answer)

    def when_settled(self, call: Callable[[Answer], None]) -> None:
        """Call it with the answer, now if there is one."""
        if self.answer is not None:
            call(self.answer)
        else:
            self._on_settled.append(call)

    async def next(self) -> Delta | None:
        """The output since the last call; None when only the answer is left."""
        while not (self._unread.text or self._unread.logprobs):
            if self.answer is not None:
                return None
            self._wake.clear()
            await self._wake.wait()
        delta, self._unread = self._unread, Delta()
        return delta

    async def all(self) -> tuple[Delta, Answer]:
        """The whole output, once there is an answer."""
        while self.answer is None:
            self._wake.clear()
            await self._wake.wait()
        return self._unread, self.answer
