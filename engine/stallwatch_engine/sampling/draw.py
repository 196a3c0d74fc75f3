"""Random numbers by counter: the n-th of a seed can be computed alone, in any order, on any batch."""

from __future__ import annotations

from typing import Final

_WORD: Final = (1 << 64) - 1
_GAMMA: Final = 0x9E3779B97F4A7C15


def uniform(seed: int, count: int) -> float:
    """A number in [0, 1) with 53 bits: the `count`-th of the SplitMix64 stream of `seed`.

    SplitMix64 (Steele, Lea, Flood 2014) adds a constant to its state and scrambles the sum, so any member
    is one multiplication away. The seed is scrambled first: neighbouring seeds have unrelated streams.
    """
    state = _scramble((seed + _GAMMA) & _WORD)
    return (_scramble((state + _GAMMA * (count + 1)) & _WORD) >> 11) * 2.0**-53


def _scramble(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)
