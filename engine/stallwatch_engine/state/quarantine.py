"""Slots and pages of a finished request, held back while a step in flight still refers to them.

A step already handed to the device reads and writes them whatever the host has decided since. They come
back with the retirement of the last step that refers to them, and not before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lease:
    """What one request held: a slot and its pages in logical order."""

    slot: int
    pages: tuple[int, ...]


class Quarantine:
    """Leases by the steps that still refer to them."""

    def __init__(self) -> None:
        self._held: dict[Lease, set[int]] = {}

    @property
    def pages(self) -> int:
        """Pages held back."""
        return sum(len(lease.pages) for lease in self._held)

    @property
    def slots(self) -> int:
        """Slots held back."""
        return len(self._held)

    def hold(self, lease: Lease, steps: Iterable[int]) -> None:
        """Hold the lease until every one of `steps` has retired. At least one must be in flight."""
        references = set(steps)
        if not references:
            raise ValueError("a lease that no step refers to needs no quarantine")
        if lease in self._held:
            raise RuntimeError(f"slot {lease.slot} is in quarantine already")
        self._held[lease] = references

    def retire(self, step: int) -> tuple[Lease, ...]:
        """The step has ended; returns the leases that nothing refers to any more."""
        ended: list[Lease] = []
        for lease, references in self._held.items():
            references.discard(step)
            if not references:
                ended.append(lease)
        for lease in ended:
            del self._held[lease]
        return tuple(ended)
