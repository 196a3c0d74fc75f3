"""Addresses in the order in which people count: worker:2 before worker:10."""

from __future__ import annotations

import re

_DIGITS = re.compile(r"([0-9]+)")


def natural(text: str) -> tuple[tuple[tuple[int, str], ...], str]:
    """A sort key. Numbers are compared by length, then by digits: no text is too long a number.

    The text itself comes last, so that 'a:1' and 'a:01' have one order.
    """
    parts = _DIGITS.split(text)  # text, digits, text, ...: like meets like
    return tuple(_number(part) if at % 2 else (0, part) for at, part in enumerate(parts)), text


def _number(digits: str) -> tuple[int, str]:
    short = digits.lstrip("0")
    return len(short), short
