"""Which columns a terminal has room for, and how wide they are. Pure.

What one looks for (how long, of how much) keeps its width; the others give theirs, in a fixed order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

GAP: Final = 2  # blanks between two columns
GONE: Final = 0

# (column, what it keeps), in the order in which they give. GONE: it is left out.
Giving = Sequence[tuple[str, int]]
LANES: Final[Giving] = (
    ("LANE", 24), ("PHASE", 24), ("DETAILS", GONE), ("CLASS", GONE), ("PHASE", 10), ("LANE", 12),
    ("USED", GONE), ("PHASE", 6), ("LANE", 8), ("PHASE", GONE), ("LANE", 4),
)  # fmt: skip
ENGINES: Final[Giving] = (
    ("  ENGINE", 24), ("WHY", GONE), ("LAST-STALL", GONE), ("RESTARTS", GONE), ("INC", GONE),
    ("  ENGINE", 8), ("STATE", 5), ("  ENGINE", 4),
)  # fmt: skip
STALLS: Final[Giving] = (
    ("CULPRIT", GONE), ("ENGINE", 12), ("KIND", 12), ("ENGINE", GONE), ("STALL", GONE), ("KIND", 4),
)  # fmt: skip


def fit(wants: Mapping[str, int], giving: Giving, width: int) -> dict[str, int]:
    """The columns that are shown, with their widths; narrower than `width` or as narrow as it goes."""
    found = dict(wants)
    for name, least in giving:
        over = sum(found.values()) + GAP * (len(found) - 1) - width
        if over <= 0:
            break
        if least == GONE:
            found.pop(name, None)
        elif name in found:
            found[name] = max(min(least, found[name]), found[name] - over)
    return found
