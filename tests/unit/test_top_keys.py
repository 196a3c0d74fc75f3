"""Keys of `top`: bytes of a terminal, in any pieces."""

from __future__ import annotations

import random

import pytest

from stallwatch.top.keys import decode


@pytest.mark.parametrize(
    ("data", "key"),
    [
        (b"q", "q"), (b"\x1b[A", "up"), (b"\x1bOB", "down"), (b"\x1b[5~", "pageup"), (b"\r", "enter"),
        (b"\x7f", "backspace"), ("ü".encode(), "ü"), ("日".encode(), "日"),
    ],
)  # fmt: skip
def test_a_key_is_the_same_whole_and_in_pieces(data: bytes, key: str) -> None:
    """Bytes that come one by one give the key that they give together."""
    assert decode(data, final=False) == ([key], b"")
    keys, rest = [], b""
    for at in range(len(data)):
        found, rest = decode(rest + data[at : at + 1], final=False)
        keys += found

    assert (keys, rest) == ([key], b"")


def test_a_lone_escape_is_a_key_only_when_nothing_follows() -> None:
    """ESC waits for what may follow; at the end it is itself."""
    assert decode(b"\x1b", final=False) == ([], b"\x1b")
    assert decode(b"\x1b", final=True) == (["esc"], b"")


def test_an_unknown_sequence_is_no_key() -> None:
    """A mouse report or a function key neither types letters nor holds up what follows."""
    assert decode(b"\x1b[<0;10;20Mq", final=False) == (["q"], b"")
    assert decode(b"\x1b[15~j", final=False) == (["j"], b"")


def test_noise_ends_and_what_waits_is_bounded() -> None:
    """Random bytes give printable keys or names, and at most 24 bytes wait for more."""
    rng = random.Random(3)
    for _ in range(500):
        data = rng.randbytes(200)
        keys, rest = decode(data, final=False)
        ended, left = decode(rest, final=True)

        assert all(key.isprintable() and key for key in keys + ended)
        assert len(rest) <= 24
        assert left == b""
