"""Bytes from a terminal as keys. Pure."""

from __future__ import annotations

import re

_ESC = 0x1B
_NAMED = {
    b"[A": "up", b"[B": "down", b"OA": "up", b"OB": "down",
    b"[5~": "pageup", b"[6~": "pagedown", b"[H": "home", b"[F": "end",
    b"[1~": "home", b"[4~": "end", b"OH": "home", b"OF": "end",
}  # fmt: skip
_CONTROL = {0x0D: "enter", 0x0A: "enter", 0x7F: "backspace", 0x08: "backspace", 0x0C: "redraw"}
_SEQUENCE = re.compile(rb"\[[0-?]{0,16}[ -/]{0,4}[@-~]|O[@-~]")
_BEGUN = re.compile(rb"(\[[0-?]{0,16}[ -/]{0,4}|O)?")


def decode(data: bytes, *, final: bool) -> tuple[list[str], bytes]:
    """Keys, and the bytes of one that is not whole yet.

    A printable character is itself; the others have names. Unknown sequences are no keys.
    final: nothing follows soon, so that a lone ESC is the key `esc`.
    """
    found: list[str] = []
    at = 0
    while at < len(data):
        if data[at] == _ESC:
            key, size = _escape(data[at + 1 :], final=final)
        elif data[at] < 0x20 or data[at] == 0x7F:
            key, size = _CONTROL.get(data[at], ""), 1
        else:
            key, size = _character(data[at:], final=final)
        if not size:
            return found, data[at:]
        found += [key] if key else []
        at += size
    return found, b""


def _escape(rest: bytes, *, final: bool) -> tuple[str, int]:
    """The key after an ESC and how many bytes it took; 0 when more must come."""
    whole = _SEQUENCE.match(rest)
    if whole:
        return _NAMED.get(whole.group(), ""), 1 + whole.end()
    if not final and _BEGUN.fullmatch(rest):
        return "", 0
    return "esc", 1


def _character(rest: bytes, *, final: bool) -> tuple[str, int]:
    """One UTF-8 character, '' for a byte that is none; 0 bytes when more must come."""
    size = 1 if rest[0] < 0xC0 else 2 if rest[0] < 0xE0 else 3 if rest[0] < 0xF0 else 4
    if len(rest) < size and not final:
        return "", 0
    try:
        character = rest[:size].decode()
    except UnicodeDecodeError:
        return "", 1
    return character if character.isprintable() else "", size
