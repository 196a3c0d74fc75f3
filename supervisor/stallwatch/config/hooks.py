"""The [hooks] table: who is told of a failure, and how."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import SplitResult, urlsplit

from pydantic import Field, field_serializer, field_validator, model_validator

from stallwatch.config.base import Duration, Limit, StrictModel

Told = Literal["stall", "exhausted", "unkillable", "recovered"]
_MASK = "***"


class HooksConfig(StrictModel):
    """A command, a webhook, spans, or all. Each gets every notice from a thread of its own."""

    events: tuple[Told, ...] = Field(default=get_args(Told), description="What is told")
    command: tuple[str, ...] = Field(
        default=(), description="Run for each notice, no shell; the notice as JSON on its stdin"
    )
    command_deadline: Limit = Field(
        default=30.0, description="Then it is killed, with all of its process group"
    )
    webhook: str = Field(  # its path may be a capability
        default="",
        repr=False,
        description="`http://` or `https://` URL; each notice is POSTed to it",
    )
    webhook_deadline: Limit = Field(default=10.0, description="Of one attempt as a whole")
    attempts: Annotated[int, Field(ge=1, le=20, strict=True)] = Field(
        default=5, description="How often one notice is tried"
    )
    backoff: tuple[Duration, ...] = Field(
        default=(1.0, 5.0, 15.0, 60.0),
        description="Waits between the attempts; the last one repeats",
    )
    secret_file: Path | None = Field(
        default=None, description="File (0600) with the key of the webhook's signature"
    )
    secret_env: str = Field(
        default="", description="Or the name of the environment variable that holds it"
    )
    queue: Annotated[int, Field(ge=1, le=10_000, strict=True)] = Field(
        default=64, description="Notices that wait, for each of them; more are dropped and counted"
    )
    spans: Annotated[bool, Field(strict=True)] = Field(
        default=False,
        description="A span per incident over OTLP; needs the extra `otel`",
    )

    @field_validator("command", mode="before")
    @classmethod
    def _a_list(cls, value: object) -> object:
        if isinstance(value, str):
            raise ValueError(  # noqa: TRY004 - pydantic turns ValueError into our sentence
                "it is one string: write a list of strings, no shell is ever used"
            )
        return value

    @field_validator("command")
    @classmethod
    def _starts_with_a_program(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if value and (not value[0].strip() or any("\0" in part for part in value)):
            raise ValueError("it names no program, or holds a NUL byte")
        return value

    # The URL is named in no message: whoever has it may post to it.
    @field_validator("webhook", mode="before")
    @classmethod
    def _a_place(cls, value: object) -> object:
        url = _split(value) if isinstance(value, str) else None
        if value != "" and (url is None or url.scheme not in ("http", "https") or not url.hostname):
            raise ValueError("it is no URL that begins with http:// or https:// and names a host")
        if url is not None and ("@" in url.netloc or not _printable(str(value))):
            raise ValueError(
                "it holds a login, a space or a control character: the signature is the proof of "
                "who sends (secret_file, secret_env)"
            )
        return value

    @field_validator("secret_env")
    @classmethod
    def _a_variable(cls, value: str) -> str:
        if value and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):  # it may be the secret
            raise ValueError("it is the name of an environment variable, never the secret itself")
        return value

    @model_validator(mode="after")
    def _fits(self) -> HooksConfig:
        if not self.command and not self.webhook and not self.spans:
            raise ValueError("none of `command`, `webhook`, `spans` is set: nobody would be told")
        if self.secret_file and self.secret_env:
            raise ValueError("secret_file and secret_env are both set: give the secret one place")
        if (self.secret_file or self.secret_env) and not self.webhook:
            raise ValueError("a secret signs what goes to `webhook`, and there is none")
        return self

    @field_serializer("webhook")
    def _shown(self, value: str) -> str:
        return self.place if value else ""

    @property
    def place(self) -> str:
        """The webhook for people: without its path, which may be all it takes to post there."""
        url = urlsplit(self.webhook)
        more = url.path.strip("/") or url.query
        return f"{url.scheme}://{url.netloc}/{_MASK if more else ''}"

    @property
    def holds_secret(self) -> bool:
        """The URL itself looks like a key: a query, or a long mixed word in its path."""
        url = urlsplit(self.webhook)
        words = re.findall(r"[A-Za-z0-9_-]{16,}", url.path)
        return bool(url.query) or any(re.search(r"\d", word) for word in words)


def _split(value: str) -> SplitResult | None:
    try:
        url = urlsplit(value)
        _: Any = url.port
    except ValueError:
        return None
    return url


def _printable(value: str) -> bool:
    return value.isascii() and value.isprintable() and " " not in value
