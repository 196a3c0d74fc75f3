"""The command line of an incarnation: four words in braces are replaced, all others pass."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from stallwatch.errors import EngineStartError

FIELDS = ("port", "name", "incarnation", "run_dir")
_FIELD = re.compile(r"\{(" + "|".join(FIELDS) + r")\}")


def expand(command: Sequence[str], values: Mapping[str, object]) -> tuple[str, ...]:
    """Replace exactly {port} {name} {incarnation} {run_dir}, item by item.

    Not str.format: `--compilation-config {"level": 3}` must pass untouched. A field without a
    value raises EngineStartError.
    """

    def value(found: re.Match[str]) -> str:
        got = values.get(found[1])
        if got is None:
            raise EngineStartError(
                f"the command uses {found[0]}, but this engine has no {found[1]}",
                hint=f"Set {found[1]} for the engine, or write the value into the command.",
            )
        return str(got)

    return tuple(_FIELD.sub(value, item) for item in command)


def uses(command: Sequence[str], field: str) -> bool:
    """True when the command names the field."""
    return any(f"{{{field}}}" in item for item in command)
