"""What has been seen of one answer so far: times, counts, a digest of its text. Bounded however long it is."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from stallwatch_engine.bench.chunk import Chunk
from stallwatch_engine.bench.histogram import Histogram
from stallwatch_engine.bench.prompt import Prompt
from stallwatch_engine.bench.result import Outcome, Result
from stallwatch_engine.bench.timeouts import TimeoutKind

MAX_TEXT = 1 << 20  # characters kept to look for the expected text


@dataclass(frozen=True, slots=True)
class End:
    """How a request ended, as its client saw it."""

    outcome: Outcome
    error: str = ""
    code: str = ""
    timeout: TimeoutKind | None = None
    failure_id: str | None = None


class Transcript:
    """Filled by the client while an answer comes; whatever ends it, `result` tells what there was."""

    def __init__(self, prompt: Prompt, began: float) -> None:
        self.gaps = Histogram()
        self.status: int | None = None
        self.finish: str | None = None
        self._expect = prompt.expect
        self._began = began  # of the run
        self._sent: float | None = None
        self._first: float | None = None
        self._last = 0.0
        self._done: float | None = None
        self._pieces = 0
        self._usage: tuple[int | None, int | None] = (None, None)
        self._digest = hashlib.sha256()
        self._text: list[str] = []
        self._kept = 0

    def sent(self, now: float) -> None:
        """The request goes out."""
        self._sent = now

    def add(self, chunk: Chunk, now: float, *, streamed: bool) -> None:
        """A piece of the answer, at the time it was read."""
        self.finish = chunk.finish or self.finish
        if chunk.output_tokens is not None:
            self._usage = (chunk.prompt_tokens, chunk.output_tokens)
        if not chunk.text:
            return
        if streamed and self._first is None:
            self._first = now
        elif streamed:
            self.gaps.add(now - self._last)
        self._last = now
        self._pieces += 1
        self._digest.update(chunk.text.encode("utf-8", "replace"))
        if self._expect is not None and self._kept < MAX_TEXT:
            self._text.append(chunk.text)
            self._kept += len(chunk.text)

    def done(self, now: float) -> None:
        """The server said that this was all of it."""
        self._done = now if self._done is None else self._done

    @property
    def is_done(self) -> bool:
        return self._done is not None

    def result(self, index: int, due_s: float, end: End) -> Result:
        """The request's result."""
        complete = end.outcome is Outcome.COMPLETED
        prompt_tokens, output_tokens = self._usage
        return Result(
            index=index,
            outcome=end.outcome,
            due_s=due_s,
            sent_s=None if self._sent is None else self._sent - self._began,
            ttft_s=self._after(self._first),
            e2e_s=self._after(self._done) if complete else None,
            itl_mean_s=self.gaps.mean,
            itl_max_s=self.gaps.greatest if self.gaps.count else None,
            prompt_tokens=prompt_tokens,
            output_tokens=self._pieces if output_tokens is None else output_tokens,
            finish_reason=self.finish,
            status=self.status,
            timeout=end.timeout,
            error=end.error,
            code=end.code,
            failure_id=end.failure_id,
            text_sha256=self._digest.hexdigest() if self._pieces else None,
            matched=self._matched(complete),
        )

    def _after(self, when: float | None) -> float | None:
        return None if when is None or self._sent is None else when - self._sent

    def _matched(self, complete: bool) -> bool | None:
        if self._expect is None:
            return None
        return complete and self._expect in "".join(self._text)
