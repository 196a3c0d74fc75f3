"""Results in OpenAI's words: one class for each of the two interfaces."""

from __future__ import annotations

import time
import uuid
from typing import Any, Protocol

from stallwatch_engine.api.exchange import Exchange
from stallwatch_engine.api.generation import Delta, TokenInfo


class Reply(Protocol):
    """How one interface writes its answers."""

    def opening(self) -> list[dict[str, Any]]:
        """Chunks before the first text."""

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """A piece of the output."""

    def closing(self, finish: str) -> dict[str, Any]:
        """The chunk that says why the output ended."""

    def usage(self, exchange: Exchange) -> dict[str, Any]:
        """The last chunk when usage was asked for."""

    def whole(self, exchange: Exchange, delta: Delta, finish: str) -> dict[str, Any]:
        """The answer in one piece."""


def usage_of(exchange: Exchange) -> dict[str, int]:
    prompt, new = exchange.prompt_tokens, exchange.generation.tokens
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


class _Base:
    def __init__(self, model: str, prefix: str, *, logprobs: bool) -> None:
        self._model = model
        self._logprobs = logprobs
        self._id = f"{prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())  # for display only

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }


class CompletionReply(_Base):
    """/v1/completions."""

    KIND = "text_completion"

    def __init__(self, model: str, *, logprobs: bool) -> None:
        super().__init__(model, "cmpl", logprobs=logprobs)

    def opening(self) -> list[dict[str, Any]]:
        return []

    def chunk(self, delta: Delta) -> dict[str, Any]:
        return self._envelope(self.KIND, [self._choice(delta, None)])

    def closing(self, finish: str) -> dict[str, Any]:
        return self._envelope(self.KIND, [self._choice(Delta(), finish)])

    def usage(self, exchange: Exchange) -> dict[str, Any]:
        return self._envelope(self.KIND, []) | {"usage": usage_of(exchange)}

    def whole(self, exchange: Exchange, delta: Delta, finish: str) -> dict[str, Any]:
        body = self._envelope(self.KIND, [self._choice(delta, finish)])
        return body | {"usage": usage_of(exchange)}

    def _choice(self, delta: Delta, finish: str | None) -> dict[str, Any]:
        logprobs = None
        if self._logprobs:
            logprobs = {
                "tokens": [info.text for info in delta.logprobs],
                "token_logprobs": [info.logprob for info in delta.logprobs],
                "top_logprobs": [_likeliest(info) for info in delta.logprobs],
                "text_offset": [info.offset for info in delta.logprobs],
            }
        return {"index": 0, "text": delta.text, "logprobs": logprobs, "finish_reason": finish}


class ChatReply(_Base):
    """/v1/chat/completions."""

    WHOLE, CHUNK = "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, *, logprobs: bool) -> None:
        super().__init__(model, "chatcmpl", logprobs=logprobs)

    def opening(self) -> list[dict[str, Any]]:
        return [self._piece({"role": "assistant", "content": ""}, Delta(), None)]

    def chunk(self, delta: Delta) -> dict[str, Any]:
        return self._piece({"content": delta.text}, delta, None)

    def closing(self, finish: str) -> dict[str, Any]:
        return self._piece({}, Delta(), finish)

    def usage(self, exchange: Exchange) -> dict[str, Any]:
        return self._envelope(self.CHUNK, []) | {"usage": usage_of(exchange)}

    def whole(self, exchange: Exchange, delta: Delta, finish: str) -> dict[str, Any]:
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": self._content(delta) if self._logprobs else None,
            "finish_reason": finish,
        }
        return self._envelope(self.WHOLE, [choice]) | {"usage": usage_of(exchange)}

    def _piece(self, text: dict[str, str], delta: Delta, finish: str | None) -> dict[str, Any]:
        logprobs = self._content(delta) if self._logprobs and delta.logprobs else None
        choice = {"index": 0, "delta": text, "logprobs": logprobs, "finish_reason": finish}
        return self._envelope(self.CHUNK, [choice])

    def _content(self, delta: Delta) -> dict[str, Any]:
        return {
            "content": [
                _token(info.text, info.logprob)
                | {"top_logprobs": [_token(text, logprob) for text, logprob in info.top]}
                for info in delta.logprobs
            ],
            "refusal": None,
        }


def _token(text: str, logprob: float) -> dict[str, Any]:
    """Half a character's bytes are not known from its text: null, as the interface allows."""
    known = "\N{REPLACEMENT CHARACTER}" not in text
    return {
        "token": text,
        "logprob": logprob,
        "bytes": list(text.encode("utf-8", "replace")) if known else None,
    }


def _likeliest(info: TokenInfo) -> dict[str, float]:
    """By text; of tokens with one text the likeliest counts."""
    found: dict[str, float] = {}
    for text, logprob in info.top:
        found.setdefault(text, logprob)
    return found
