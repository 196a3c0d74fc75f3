"""Where requests go and what every one of them carries."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal
from urllib.parse import urlsplit

from stallwatch_engine.bench.errors import PlanRefused
from stallwatch_engine.bench.prompt import Prompt

Endpoint = Literal["completions", "chat"]
_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class Target:
    """url: of the server, with or without /v1. model: empty asks the server for its first one.

    extra: fields added to every body, over ours. headers: added to every request.
    """

    url: str
    model: str = ""
    endpoint: Endpoint = "completions"
    stream: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            secret = parts.username is not None  # it would end in reports
        except ValueError:
            good, secret = False, False
        if secret:
            raise PlanRefused("url", "it holds a user", hint="give credentials as a header")
        if not good:
            raise PlanRefused("url", repr(self.url), hint="write it like http://127.0.0.1:8000")
        try:
            json.dumps(dict(self.extra), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise PlanRefused("extra fields", str(error)) from None

    @property
    def base(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def address(self) -> str:
        return self.base + _PATHS[self.endpoint]

    def check(self, prompt: Prompt) -> None:
        """PlanRefused when this prompt cannot be asked this way. Cheap: a plan has many."""
        if self.endpoint == "chat" and isinstance(prompt.content, tuple):
            prompt.chat()

    def body(self, prompt: Prompt) -> bytes:
        """The request's JSON. PlanRefused when this prompt cannot be asked this way."""
        own = prompt.chat() if self.endpoint == "chat" else prompt.completion()
        fields_: dict[str, Any] = {"model": self.model, **own, "stream": self.stream}
        if self.stream:
            fields_["stream_options"] = {"include_usage": True}
        return json.dumps(fields_ | dict(self.extra)).encode()


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. total: of a request, never without. connect: to be connected. read: between two reads, or None."""

    total: float = 600.0
    connect: float = 10.0
    read: float | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise PlanRefused(f"{each.name} timeout", f"{value} is not above 0")
