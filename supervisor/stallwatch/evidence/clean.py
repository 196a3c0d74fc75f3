"""Text from an engine, made safe to store and print. Nothing a worker writes is trusted."""

from __future__ import annotations

import unicodedata

CAP = 256
# Cc and Cf hold terminal escapes and the bidirectional overrides that make a line read backwards;
# Cs cannot be encoded as UTF-8; Zl and Zp break a line where a reader does not expect it.
_REFUSED = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def clean(text: str, cap: int = CAP) -> str:
    """The text on one line, without control characters, at most `cap` characters long."""
    cut = text[:cap]
    if not cut.isprintable():
        cut = "".join(map(_shown, cut))
    return cut if len(text) <= cap else cut[: cap - 1] + "…"


def _shown(char: str) -> str:
    kind = unicodedata.category(char)
    return " " if kind == "Zs" else "?" if kind in _REFUSED else char


def clean_bytes(raw: bytes, cap: int = CAP) -> str:
    """Bytes as clean text; what is not UTF-8 shows as the replacement character."""
    return clean(raw[: 4 * cap + 4].decode("utf-8", "replace"), cap)
