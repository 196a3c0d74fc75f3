"""What every table of the configuration is made of."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict

from stallwatch.config.duration import parse_duration, parse_limit

Duration = Annotated[float, BeforeValidator(parse_duration)]
Limit = Annotated[float, BeforeValidator(parse_limit)]


class Reloadable:
    """Metadata of a key that a SIGHUP changes in a running daemon; all others take a restart."""


RELOADABLE: Final = Reloadable()


class StrictModel(BaseModel):
    """A table: unknown keys are errors, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


def reloadable(model: type[BaseModel]) -> frozenset[str]:
    """The keys of a table that SIGHUP takes."""
    fields = model.model_fields.items()
    return frozenset(name for name, field in fields if RELOADABLE in field.metadata)


def split_address(value: str) -> tuple[str, int]:
    """('127.0.0.1', 9470) from '127.0.0.1:9470'; '[::1]:9470' too. Raises ValueError."""
    host, colon, port = value.rpartition(":")
    if not colon or not host or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ValueError(f"{value!r} is no HOST:PORT (e.g. '127.0.0.1:9470')")
    return host.removeprefix("[").removesuffix("]"), int(port)
