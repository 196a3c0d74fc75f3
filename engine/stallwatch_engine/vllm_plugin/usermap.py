"""A user's own phase map: a TOML file, or a file holding one Python literal, read at start.

    [[phase]]
    target = "my_engine.model:Runner.decode"
    lane = "main"
    phase = "decode"
    class = "work"              # idle, work, wait, start, pause, stop
    on = ""                     # for wait: "role:rank/lane"
    limit = 30.0                # seconds; leave out to use the supervisor's limit for the phase
    details = ["tokens=1.num_tokens"]

The literal form is `{"phase": [{...}, ...]}` with the same keys.
"""

from __future__ import annotations

import ast
import logging
import os
import tomllib
from collections.abc import Mapping
from typing import Any

from stallwatch_engine.phasemap import Row

_log = logging.getLogger("stallwatch")
_KEYS = {"target", "lane", "phase", "class", "on", "limit", "details"}


def parse(text: str, *, toml: bool) -> list[Row]:
    """The rows of a map; ValueError names the row and the key that is wrong."""
    data = tomllib.loads(text) if toml else ast.literal_eval(text)
    if not isinstance(data, Mapping) or not isinstance(data.get("phase"), list):
        raise ValueError("a phase map is a list of [[phase]] tables")  # noqa: TRY004  bad data, not a bad call
    return [_row(number, entry) for number, entry in enumerate(data["phase"], 1)]


def _row(number: int, entry: Any) -> Row:
    if not isinstance(entry, Mapping):
        raise ValueError(f"phase {number} is no table")  # noqa: TRY004
    if unknown := sorted(set(entry) - _KEYS):
        raise ValueError(f"phase {number}: unknown key {unknown[0]!r} (known: {sorted(_KEYS)})")
    if missing := sorted({"target", "phase"} - set(entry)):
        raise ValueError(f"phase {number}: {missing[0]!r} is missing")
    try:
        return Row(
            str(entry["target"]),
            str(entry.get("lane", "main")),
            str(entry["phase"]),
            str(entry.get("class", "work")),
            on=str(entry.get("on", "")),
            details=tuple(str(detail) for detail in entry.get("details", ())),
            limit_s=float(entry.get("limit", 0.0)),
        )
    except (TypeError, ValueError) as problem:
        raise ValueError(f"phase {number}: {problem}") from None


def from_environment(variable: str) -> list[Row]:
    """The rows of the file that the variable names; none, and a log line, when it is unusable."""
    path = os.environ.get(variable)
    if not path:
        return []
    try:
        with open(path, encoding="utf-8") as file:
            return parse(file.read(), toml=path.endswith(".toml"))
    except (OSError, ValueError, SyntaxError) as problem:
        _log.warning("stallwatch: %s=%s is not used: %s", variable, path, problem)
        return []
