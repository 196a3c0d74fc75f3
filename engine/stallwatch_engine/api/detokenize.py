"""Text from tokens as they come: no character is split, no stop string is half shown."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

# A character has at most four bytes and a token at least one, so only the last three tokens can
# belong to a character that is still to be completed; more than this held back is no character.
UNFINISHED = 3
MAX_HELD = 8


class Detokenizer:
    """The text of a growing list of tokens. Special tokens have none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._held: list[int] = []  # tokens whose text has not come out yet

    def push(self, token: int) -> str:
        """What can be shown now, often the token's own text, "" inside a character."""
        self._held.append(token)
        try:
            text = self._stream.step(self._tokenizer, token)
        except Exception:  # the library lost its place in bytes that are no text
            return self._restart(keep=0)
        if text is not None:
            self._held.clear()
            return str(text)
        if len(self._held) > MAX_HELD:
            return self._restart(keep=UNFINISHED)
        return ""

    def flush(self) -> str:
        """What is left at the end: an unfinished character shows as U+FFFD."""
        return self._restart(keep=0)

    def _restart(self, keep: int) -> str:
        """Give out what is held, invalid bytes as U+FFFD, but for up to `keep` last tokens."""
        held, whole = self._held, self._decode(self._held)
        cut, text = len(held), whole
        for size in range(min(keep, len(held) - 1), 0, -1):
            head = self._decode(held[:-size])
            if head + self._decode(held[-size:]) == whole:  # no character lies across the cut
                cut, text = len(held) - size, head
                break
        self._stream = DecodeStream(skip_special_tokens=True)
        self._held = held[cut:]
        for token in self._held:
            self._stream.step(self._tokenizer, token)
        return text

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


class StopScanner:
    """Holds back the end of a text as long as it may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """What may be shown. Once `stopped`, the stop string and all after it are gone."""
        if self.stopped:
            return ""
        text = self._held + text
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """At the end: what was held back is text after all."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, text: str) -> int:
        """The length of the longest end of `text` that is a beginning of a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
