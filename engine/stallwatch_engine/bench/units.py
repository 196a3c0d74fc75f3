"""Durations on the command line and in gates: '2s', '250ms', '1m30s'."""

from __future__ import annotations

import re

_PART = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ms|us|s|m|h)")
_WHOLE = re.compile(r"(?:\d{1,9}(?:\.\d{1,9})?(?:ms|us|s|m|h))+")
_SIZE = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PLAIN = re.compile(r"\d{1,9}(\.\d{1,9})?")


def parse_seconds(text: str) -> float | None:
    """The duration in seconds; None when it is none. Bare digits are seconds."""
    if _PLAIN.fullmatch(text):
        return float(text)
    if not _WHOLE.fullmatch(text):
        return None
    return sum(float(number) * _SIZE[unit] for number, unit in _PART.findall(text))


def show_seconds(seconds: float | None) -> str:
    """For a table: three significant figures and a unit."""
    if seconds is None:
        return "-"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g}us"
    return f"{seconds * 1e3:.3g}ms" if seconds < 1 else f"{seconds:.4g}s"
