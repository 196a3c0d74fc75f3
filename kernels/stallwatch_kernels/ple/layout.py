"""Where each n-gram head's rows lie in a layer's table, and how token ids are mixed into them.

Nothing here is stored anywhere else: the multipliers and the primes follow from a few numbers of the
model's configuration. A checkpoint stores them too, and `verify` refuses one that disagrees.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, count, islice
from typing import Any

from stallwatch_kernels.errors import BadMetadata

KERNEL = "ple.layout"

_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_WORD = (1 << 64) - 1
_INT63 = (1 << 63) - 1
_SEED_PER_LAYER = 10007

# These bases make Miller-Rabin exact below 3.3e24, so for every 64-bit number (Sorenson, Webster 2015).
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramNumbers:
    """What the configuration says about all n-gram tables of a model."""

    vocab_size: int
    embed_dim: int
    ngram_size: int
    heads_per_ngram: int
    vocab_base: int
    eos: int
    divisible_by: int = 128
    seed: int = 1234
    parts: int = 512

    def __post_init__(self) -> None:
        for name in ("vocab_size", "embed_dim", "heads_per_ngram", "divisible_by", "parts"):
            if getattr(self, name) < 1:
                raise BadMetadata(KERNEL, name, f"is {getattr(self, name)}; expected at least 1")
        if self.ngram_size < 2:
            raise BadMetadata(KERNEL, "ngram_size", f"is {self.ngram_size}; expected at least 2")
        if self.vocab_base < 2:
            raise BadMetadata(KERNEL, "vocab_base", f"is {self.vocab_base}; expected at least 2")
        if self.embed_dim % self.heads:
            raise BadMetadata(
                KERNEL,
                "embed_dim",
                f"is {self.embed_dim}; expected a multiple of {self.heads} heads",
            )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> NgramNumbers:
        """From the fields of a Qwen4-Exp text configuration; of a list of end tokens the first counts."""
        eos = config["eos_token_id"]
        return cls(
            vocab_size=config["vocab_size"],
            embed_dim=config["ple_embed_dim"],
            ngram_size=config["ngram_size"],
            heads_per_ngram=config["heads_per_ngram"],
            vocab_base=config["ngram_vocab_size_base"],
            eos=eos[0] if isinstance(eos, list) else eos,
            divisible_by=config.get("make_ngram_vocab_size_divisible_by", 128),
            seed=config.get("seed", 1234),
            parts=config.get("split_ngram_parts", 512),
        )

    @property
    def heads(self) -> int:
        """H: heads of all n-gram orders together."""
        return (self.ngram_size - 1) * self.heads_per_ngram

    @property
    def head_dim(self) -> int:
        """Elements of one table row."""
        return self.embed_dim // self.heads


@dataclass(frozen=True, slots=True)
class NgramLayout:
    """One PLE layer's table: `multipliers[n]`, and for each of H heads its prime and its first row."""

    numbers: NgramNumbers
    ordinal: int
    multipliers: tuple[int, ...]
    primes: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Rows that a hash can name."""
        return sum(self.primes)

    @property
    def padded_rows(self) -> int:
        """Rows that the checkpoint stores."""
        return -(-self.rows // self.numbers.divisible_by) * self.numbers.divisible_by

    def shard_rows(self) -> tuple[int, ...]:
        """Rows of each stored part; the last non-empty one may be shorter, later ones are empty."""
        each = -(-self.padded_rows // self.numbers.parts)
        starts = range(0, self.numbers.parts * each, each)
        return tuple(max(0, min(each, self.padded_rows - start)) for start in starts)


def ngram_layout(numbers: NgramNumbers, ordinal: int) -> NgramLayout:
    """The layout of the `ordinal`-th PLE layer, from 0 in order of depth."""
    if ordinal < 0:
        raise BadMetadata(KERNEL, "ordinal", f"is {ordinal}; expected at least 0")
    heads = numbers.heads
    primes = _primes_from(numbers.vocab_base, (ordinal + 1) * heads)[ordinal * heads :]
    return NgramLayout(
        numbers=numbers,
        ordinal=ordinal,
        multipliers=_multipliers(numbers, ordinal),
        primes=primes,
        offsets=tuple(accumulate(primes[:-1], initial=0)),
    )


def verify(
    layout: NgramLayout,
    multipliers: Sequence[int],
    primes: Sequence[int],
    offsets: Sequence[int],
) -> None:
    """Compare the buffers stored in a checkpoint with the recomputation.

    Raises BadMetadata that names the buffer and the first place where it differs: a table hashed in
    another way would give plausible, wrong rows.
    """
    stored = {
        "layer_multipliers": (multipliers, layout.multipliers),
        "ngram_heads_vocab_sizes": (primes, layout.primes),
        "ngram_heads_offsets": (offsets, layout.offsets),
    }
    for name, (found, expected) in stored.items():
        if len(found) != len(expected):
            problem = (
                f"of PLE layer {layout.ordinal} has {len(found)} entries; expected {len(expected)}"
            )
            raise BadMetadata(KERNEL, name, problem)
        for place, (ours, theirs) in enumerate(zip(expected, found, strict=True)):
            if int(theirs) != ours:
                problem = (
                    f"of PLE layer {layout.ordinal} holds {theirs} at {place}; expected {ours}"
                )
                raise BadMetadata(KERNEL, name, problem)


def is_prime(number: int) -> bool:
    """Deterministic Miller-Rabin for numbers below 2^64."""
    if number < 2:
        return False
    for small in _WITNESSES:
        if number % small == 0:
            return number == small
    odd = number - 1
    twos = (odd & -odd).bit_length() - 1
    odd >>= twos
    return all(_passes(number, witness, odd, twos) for witness in _WITNESSES)


def _passes(number: int, witness: int, odd: int, twos: int) -> bool:
    power = pow(witness, odd, number)
    if power in {1, number - 1}:
        return True
    for _ in range(twos - 1):
        power = power * power % number
        if power == number - 1:
            return True
    return False


@lru_cache(maxsize=32)
def _primes_from(base: int, many: int) -> tuple[int, ...]:
    numbers: Iterator[int] = (number for number in count(base) if is_prime(number))
    return tuple(islice(numbers, many))


def _multipliers(numbers: NgramNumbers, ordinal: int) -> tuple[int, ...]:
    """Odd, and small enough that a legal token times a multiplier fits in 63 bits."""
    half = max(1, (_INT63 // numbers.vocab_size) // 2)
    seed = numbers.seed + _SEED_PER_LAYER * ordinal
    words = ((seed + _GAMMA * (i + 1)) & _WORD for i in range(numbers.ngram_size))
    return tuple(2 * (_mix(word) % half) + 1 for word in words)


def _mix(word: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), its increment included."""
    word = (word + _GAMMA) & _WORD
    word = ((word ^ (word >> 30)) * _MIX_1) & _WORD
    word = ((word ^ (word >> 27)) * _MIX_2) & _WORD
    return word ^ (word >> 31)
