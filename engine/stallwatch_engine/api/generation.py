"""The growing output of one request: what the worker sent, checked, as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from stallwatch_engine.api.detokenize import Detokenizer, StopScanner
from stallwatch_engine.api.text import TextCodec
from stallwatch_engine.wire import Sampling, TokenLogprob, Tokens


class BadOutput(Exception):
    """The worker sent tokens that this request cannot have."""


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """A token with its log-probability and those of the likeliest ones; offset in characters."""

    text: str
    logprob: float
    top: list[tuple[str, float]]
    offset: int


@dataclass(slots=True)
class Delta:
    """A piece of the output."""

    text: str = ""
    tokens: int = 0
    logprobs: list[TokenInfo] = field(default_factory=list)

    def add(self, other: Delta) -> None:
        self.text += other.text
        self.tokens += other.tokens
        self.logprobs += other.logprobs


class Generation:
    """Detokenises, looks for stop strings, counts. `finish` is set when the output is complete."""

    def __init__(
        self, codec: TextCodec, sampling: Sampling, stops: Sequence[str], *, vocab_size: int
    ) -> None:
        self._codec = codec
        self._vocab = vocab_size  # the model's; it may be padded beyond the tokenizer's
        self._sampling = sampling
        self._detokenizer = Detokenizer(codec.tokenizer)
        self._scanner = StopScanner(stops)
        self._length = 0  # characters that came out of the detokenizer
        self.tokens = 0
        self.finish: str | None = None

    def feed(self, message: Tokens) -> Delta:
        """What the message adds. BadOutput when the request did not ask for such a thing."""
        self._check(message)
        delta = Delta()
        for at, token in enumerate(message.ids):
            if message.logprobs is not None:
                delta.logprobs.append(self._info(token, message.logprobs[at]))
            delta.tokens += 1
            delta.text += self._text(self._detokenizer.push(token))
            if self._scanner.stopped:
                break
        self.tokens += delta.tokens
        if not self._scanner.stopped and message.finish is not None:
            delta.text += self._text(self._detokenizer.flush()) + self._scanner.flush()
            self.finish = message.finish
        if self._scanner.stopped:
            self.finish = "stop"
        return delta

    def _text(self, raw: str) -> str:
        self._length += len(raw)
        return self._scanner.push(raw)

    def _info(self, token: int, found: TokenLogprob) -> TokenInfo:
        text = self._codec.token_text
        top = [(text(other), logprob) for other, logprob in found.top]
        return TokenInfo(text(token), found.logprob, top, self._length)

    def _check(self, message: Tokens) -> None:
        if self.tokens + len(message.ids) > self._sampling.max_tokens:
            raise BadOutput(f"over the {self._sampling.max_tokens} tokens asked for")
        if max(message.ids, default=0) >= self._vocab:
            raise BadOutput("a token outside the vocabulary")
        asked = self._sampling.logprobs
        if (asked is None) != (message.logprobs is None) and message.ids:
            raise BadOutput("log-probabilities are missing or were not asked for")
        if message.logprobs and any(len(entry.top) > (asked or 0) for entry in message.logprobs):
            raise BadOutput(f"more than the {asked} likeliest tokens asked for")
        if any(t >= self._vocab for e in message.logprobs or () for t, _ in e.top):
            raise BadOutput("a likely token outside the vocabulary")
