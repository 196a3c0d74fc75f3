"""One request as it is planned: what is asked, for how many tokens, what is expected back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stallwatch_engine.bench.errors import PlanRefused

MAX_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """content: a text, token ids, or the turns of a chat.

    max_tokens: the longest answer. expect: the answer must contain it to count for `accuracy`.
    at: seconds from the start of a trace; None in prompts that carry no time of their own.
    """

    content: str | tuple[int, ...] | tuple[Message, ...]
    max_tokens: int
    expect: str | None = None
    at: float | None = None

    def __post_init__(self) -> None:
        if not self.content:
            raise PlanRefused("prompt", "it is empty")
        if not 1 <= self.max_tokens <= MAX_TOKENS:
            raise PlanRefused("max_tokens", f"{self.max_tokens} is not in 1..{MAX_TOKENS}")

    def completion(self) -> dict[str, Any]:
        """The fields of a completions request that belong to this prompt."""
        content = self.content
        if not isinstance(content, str):
            turns = [part for part in content if isinstance(part, Message)]
            ids = [part for part in content if isinstance(part, int)]
            return {
                "prompt": "\n".join(turn.content for turn in turns) if turns else ids,
                "max_tokens": self.max_tokens,
            }
        return {"prompt": content, "max_tokens": self.max_tokens}

    def chat(self) -> dict[str, Any]:
        """The fields of a chat request. PlanRefused for token ids: a chat has texts only."""
        content = self.content
        if isinstance(content, str):
            messages = [{"role": "user", "content": content}]
        else:
            messages = [
                {"role": part.role, "content": part.content}
                for part in content
                if isinstance(part, Message)
            ]
        if not messages:
            raise PlanRefused(
                "prompt", "token ids cannot be a chat", hint="use --endpoint completions"
            )
        return {"messages": messages, "max_tokens": self.max_tokens}
