"""The [gateway] table."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from stallwatch.config.base import Duration, Limit, StrictModel, split_address
from stallwatch.config.duration import show_duration
from stallwatch.gateway.options import Options

Count = Annotated[int, Field(ge=1, le=1_000_000, strict=True)]


class GatewayLimits(StrictModel):
    """How long a client may get no byte, by what it waits for."""

    first_token: Limit = Field(default=120.0, description="To the first byte of a stream")
    between_tokens: Limit = Field(default=60.0, description="Between two pieces of a stream")
    whole_answer: Limit = Field(default=600.0, description="Of a request that is not streamed")


class GatewayConfig(StrictModel):
    """The pass-through in front of the engines, in a process of its own."""

    listen: str = Field(
        default="127.0.0.1:8000",
        description="Where clients come: `HOST:PORT` or `unix:/ABSOLUTE/PATH`",
    )
    engines: tuple[str, ...] = Field(
        default=(), description="The replicas of one engine; without it, every engine with a `port`"
    )
    upstreams: dict[str, str] = Field(
        default_factory=dict,
        description="Where an engine listens, by name, if not on its `port`: `HOST:PORT` or "
        "`unix:/ABSOLUTE/PATH`",
    )
    hold: Duration = Field(
        default=0.0,
        description='A request waits so long for an engine to be ready; `"0s"`: refused',
    )
    hold_most: Count = Field(default=256, description="Requests that may wait so at a time")
    retry: Literal["never", "before-first-byte"] = Field(
        default="never",
        description='`"before-first-byte"`: a request that had got no byte at a FAILURE is sent '
        "once more",
    )
    max_in_flight: Count = Field(
        default=1024, description="More requests than that are refused with 429"
    )
    max_connections: Count = Field(default=4096, description="Clients' connections open at a time")
    deadline: Duration = Field(default=0.0, description='Of one request as a whole; `"0s"`: none')
    slow_client: Duration = Field(
        default=60.0,
        description='A client that takes or sends nothing for so long is dropped; `"0s"`: never',
    )
    drain: Duration = Field(
        default=30.0,
        description="At SIGTERM, what runs may finish for so long; nothing new is taken",
    )
    limits: GatewayLimits = Field(
        default=GatewayLimits(), description="How long a client may get no byte"
    )

    @field_validator("listen")
    @classmethod
    def _listen(cls, value: str) -> str:
        return _place(value)

    @field_validator("upstreams")
    @classmethod
    def _upstreams(cls, value: dict[str, str]) -> dict[str, str]:
        return {name: _place(place) for name, place in value.items()}

    @model_validator(mode="after")
    def _named(self) -> GatewayConfig:
        for name in self.upstreams:
            if self.engines and name not in self.engines:
                raise ValueError(f"upstreams names {name!r}, which is not among `engines`")
        return self

    @property
    def port(self) -> int | None:
        """The TCP port it listens on; None: a unix socket."""
        return None if self.listen.startswith("unix:") else split_address(self.listen)[1]

    def options(self) -> Options:
        """What the gateway process is told."""
        return Options(
            listen=self.listen,
            engines=self.engines,
            upstreams=dict(self.upstreams),
            hold=self.hold,
            hold_most=self.hold_most,
            retry=self.retry,
            max_in_flight=self.max_in_flight,
            max_connections=self.max_connections,
            deadline=self.deadline,
            first_token=self.limits.first_token,
            between_tokens=self.limits.between_tokens,
            whole_answer=self.limits.whole_answer,
            slow_client=self.slow_client,
            drain=self.drain,
        )

    def written(self) -> dict[str, Any]:
        """The table as a file would hold it: durations as text."""
        found = self.model_dump(mode="json")
        for table in (found, found["limits"]):
            table |= {k: show_duration(v) for k, v in table.items() if isinstance(v, float)}
        return found

    def flags(self) -> Iterator[str]:
        """The same as flags of `stallwatch gateway`."""
        yield from ("--listen", self.listen, "--retry", self.retry)
        for name in self.engines:
            yield from ("--engine", name)
        for name, place in self.upstreams.items():
            yield from ("--upstream", f"{name}={place}")
        for key in ("hold_most", "max_in_flight", "max_connections"):
            yield from (f"--{key.replace('_', '-')}", str(getattr(self, key)))
        durations = {
            key: getattr(self, key) for key in ("hold", "deadline", "slow_client", "drain")
        }
        for key, value in {**durations, **dict(self.limits)}.items():
            yield from (f"--{key.replace('_', '-')}", show_duration(value))


def _place(value: str) -> str:
    """'HOST:PORT' or 'unix:/ABSOLUTE/PATH'. Raises ValueError."""
    if not value.startswith("unix:"):
        split_address(value)
        return value
    path = value.removeprefix("unix:")
    if not os.path.isabs(path) or len(os.fsencode(path)) > 107:
        raise ValueError(f"{value!r}: a unix socket needs an absolute path of at most 107 bytes")
    return value
