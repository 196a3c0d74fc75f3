"""Durations are strings with units: '250ms', '60s', '1h30m'. Anything else is refused by name."""

from __future__ import annotations

import math
import re

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


def parse_duration(value: object) -> float:
    """Seconds, finite and >= 0.

    Raises ValueError with a sentence that names the form: a bare number, NaN, infinity and
    negative values are refused, since a NaN limit compares false with everything and would
    switch the net off silently (vllm-omni learnt this in production).
    """
    if isinstance(value, bool) or not isinstance(value, str):
        raise ValueError(  # noqa: TRY004 - pydantic turns ValueError into our sentence
            f"{value!r} has no unit: write a string such as '60s', '250ms' or '30m'"
        )
    text = value.strip().lower()
    if text in {"nan", "inf", "infinity", "-inf"} or text.startswith("-"):
        raise ValueError(f"{value!r} is no finite, positive duration: write e.g. '60s'")
    position = 0
    total = 0.0
    for match in _PART.finditer(text):
        if match.start() != position:
            break
        total += float(match[1]) * _UNITS[match[2]]
        position = match.end()
    if not text or position != len(text) or not math.isfinite(total):
        raise ValueError(
            f"{value!r} is no duration: write a number and ms, s, m, h or d, e.g. '60s'"
        )
    return total


def parse_limit(value: object) -> float:
    """A limit: a duration that is not zero."""
    found = parse_duration(value)
    if found <= 0:
        raise ValueError(
            f"{value!r} is zero: a limit must be positive (leave it out for the default)"
        )
    return found


def show_duration(seconds: float) -> str:
    """'90s' as '1m30s': the shortest exact form of whole units, else seconds."""
    if seconds < 1 or seconds != int(seconds):
        return f"{seconds * 1000:g}ms" if seconds < 1 else f"{seconds:g}s"
    left, out = int(seconds), ""
    for unit, size in (("h", 3600), ("m", 60), ("s", 1)):
        count, left = divmod(left, size)
        out += f"{count}{unit}" if count else ""
    return out or "0s"
