"""One JSON object of an answer, whole or a stream's chunk, in either interface. Nothing in it is trusted. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_MAX_WORDS = 500
_MAX_COUNT = 1 << 40
_TEXTS = ("content", "reasoning_content", "reasoning", "text")


class BadAnswer(Exception):
    """The server sent what is no OpenAI answer: `message` says which part."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """text: new text. error: the OpenAI error object, empty when there is none. Counts by `usage`."""

    text: str = ""
    finish: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    error: Mapping[str, Any] = field(default_factory=dict)


def parse_chunk(data: str | bytes) -> Chunk:
    """Raises BadAnswer for what is no JSON object."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise BadAnswer("no JSON where an answer was due") from None
    if not isinstance(value, dict):
        raise BadAnswer("a JSON value that is no object")
    error = error_of(value)
    if error:
        return Chunk(error=error)
    text, finish = _choice(value)
    usage = value.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    return Chunk(
        text, finish, _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    )


def error_of(value: Mapping[str, Any]) -> dict[str, Any]:
    """The error object of a body: `{"error": {...}}`, or vLLM's older flat form; empty without one."""
    error = value.get("error")
    if isinstance(error, dict) and error:
        return error
    if error:
        return {"message": str(error)}
    return dict(value) if value.get("object") == "error" else {}


def plain(text: object) -> str:
    """A server's words on one line without controls: they must not drive a terminal."""
    return "".join(c if c.isprintable() else " " for c in str(text)[:_MAX_WORDS])


def _choice(value: Mapping[str, Any]) -> tuple[str, str | None]:
    choices = value.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        return "", None
    inner = choice.get("delta") or choice.get("message")
    source = inner if isinstance(inner, dict) else choice
    text = "".join(part for name in _TEXTS if isinstance(part := source.get(name), str))
    finish = choice.get("finish_reason")
    return text, plain(finish) if isinstance(finish, str) else None


def _count(value: object) -> int | None:
    known = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_COUNT
    return value if known and isinstance(value, int) else None
