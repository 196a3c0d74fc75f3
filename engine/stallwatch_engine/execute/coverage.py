"""Which shapes of a step were prepared, and which were met that were not.

A decode shape is its number of requests. A prepared one has its static buffers, every compiled signature,
and one dummy step on null slots behind it. Prefill has one shape: its kernels are the same for any number of
tokens, and its buffers are those of the largest step.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

PREFILL = "prefill"


def shape_of(tokens: int, requests: int) -> str:
    """The name of a step's shape: C1, C2, ..., or prefill."""
    return f"C{requests}" if tokens == requests else PREFILL


@dataclass(slots=True)
class Coverage:
    """`declared` shapes may be asked for; `missed` counts steps whose shape was not prepared."""

    declared: tuple[str, ...]
    prepared: set[str] = field(default_factory=set)
    missed: Counter[str] = field(default_factory=Counter)
    graph: str = "none"
    captured: int = 0

    @classmethod
    def up_to(cls, requests: int) -> Coverage:
        """All decode shapes up to that many requests, and prefill."""
        return cls((*(f"C{n}" for n in range(1, requests + 1)), PREFILL))

    @property
    def decode(self) -> tuple[int, int]:
        """Decode shapes prepared, and declared."""
        decode = [shape for shape in self.declared if shape != PREFILL]
        return sum(shape in self.prepared for shape in decode), len(decode)

    @property
    def complete(self) -> bool:
        """Nothing that may be asked for is unprepared."""
        return set(self.declared) <= self.prepared

    def meet(self, shape: str) -> None:
        """A step of that shape is launched."""
        if shape not in self.prepared:
            self.missed[shape] += 1

    def __str__(self) -> str:
        done, all_ = self.decode
        missing = [shape for shape in self.declared if shape not in self.prepared]
        rest = f", not {' '.join(missing)}" if missing else ""
        return f"prepared {done}/{all_} decode shapes{rest}; graph={self.graph}, captured={self.captured}"
