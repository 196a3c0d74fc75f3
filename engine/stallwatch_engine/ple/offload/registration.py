"""What a rank says about itself, and whether all of it fits. Pure.

Nothing is taken on trust: the offload process writes into memory that a rank describes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from stallwatch_engine.ple.errors import RegistrationRefused
from stallwatch_engine.ple.protocol import RowSource
from stallwatch_engine.ple.shape import PleShape

PROTOCOL = 1


@dataclass(frozen=True, slots=True)
class Registration:
    """Rank `rank` of `ranks`; rank 0 leads: its inputs count, all ranks get rows."""

    rank: int
    ranks: int
    shape: PleShape

    def pack(self) -> bytes:
        record = {
            "protocol": PROTOCOL,
            "rank": self.rank,
            "ranks": self.ranks,
            "shape": self.shape.describe(),
        }
        return json.dumps(record).encode()

    @classmethod
    def parse(cls, raw: bytes, rank: int) -> Registration:
        """RegistrationRefused, in the name of the rank that owns the socket, for anything else."""
        try:
            record: Any = json.loads(raw)
        except ValueError as error:
            raise RegistrationRefused(rank, "record", "is no JSON") from error
        if not isinstance(record, dict) or set(record) != {"protocol", "rank", "ranks", "shape"}:
            raise RegistrationRefused(rank, "record", "does not have the fields of a registration")
        if record["protocol"] != PROTOCOL:
            problem = f"is {record['protocol']!r}; expected {PROTOCOL}"
            raise RegistrationRefused(rank, "protocol", problem)
        for name in ("rank", "ranks"):
            if type(record[name]) is not int:
                raise RegistrationRefused(rank, name, f"is {record[name]!r}; expected an integer")
        try:
            shape = PleShape.parse(record["shape"])
        except (ValueError, TypeError) as error:
            raise RegistrationRefused(rank, "shape", f"is unusable ({error})") from error
        return cls(record["rank"], record["ranks"], shape)


class Roster:
    """The ranks that have registered, out of those that are expected."""

    def __init__(self, ranks: int, source: RowSource) -> None:
        self._ranks = ranks
        self._source = source
        self._known: dict[int, Registration] = {}

    @property
    def complete(self) -> bool:
        return len(self._known) == self._ranks

    def add(self, owner: int, new: Registration, *, size: int, needed: int) -> None:
        """Take the registration that came over the socket of rank `owner`, with memory of `size` bytes.

        RegistrationRefused for a second one, another rank's name, a shape that the tables or the other
        ranks contradict, and memory of another size than the shape needs.
        """
        expected: tuple[tuple[str, object, object], ...] = (
            ("rank", new.rank, owner),
            ("ranks", new.ranks, self._ranks),
            ("layers", new.shape.layers, self._source.layers),
            ("embed", new.shape.embed, self._source.embed),
            ("dtype", new.shape.dtype, self._source.dtype),
            ("ngram", new.shape.ngram, self._source.ngram),
            ("memory", size, needed),
        )
        for field, found, wanted in expected:
            if found != wanted:
                raise RegistrationRefused(owner, field, f"is {found}; expected {wanted}")
        if owner in self._known:
            raise RegistrationRefused(owner, "rank", "has registered before")
        for other in self._known.values():
            if other.shape != new.shape:
                problem = f"differs from that of rank {other.rank}"
                raise RegistrationRefused(owner, "shape", problem)
        self._known[owner] = new
