"""Indices handed out and taken back: pages of the caches, slots of the per-request states.

`NULL` is no index: the slot of a padding row, the page of a table entry not yet used. Kernels touch no state
there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch

NULL: Final = -1


class IndexPool:
    """The indices below `count`. The one returned longest ago is handed out first, so reuse comes late."""

    def __init__(self, what: str, count: int) -> None:
        if count < 1:
            raise ValueError(f"a pool of {what} needs at least one, got {count}")
        self.what = what
        self.count = count
        self._free = deque(range(count))
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        """How many can be taken now."""
        return len(self._free)

    def take(self, many: int = 1) -> tuple[int, ...]:
        """Take `many`. The caller has looked at `free`: too few is a defect, raised as RuntimeError."""
        if many > len(self._free):
            raise RuntimeError(f"{many} {self.what} asked for, {len(self._free)} are free")
        taken = tuple(self._free.popleft() for _ in range(many))
        self._taken.update(taken)
        return taken

    def give_back(self, indices: Iterable[int]) -> None:
        """Return indices. One that was not taken would soon belong to two requests: RuntimeError."""
        for index in indices:
            if index not in self._taken:
                raise RuntimeError(f"{self.what} index {index} is returned, but was not taken")
            self._taken.remove(index)
            self._free.append(index)


@dataclass(frozen=True, slots=True)
class PageWrite:
    """Entry `index` of a slot's page table becomes `page`, which the slot's request alone will use."""

    slot: int
    index: int
    page: int


class PageTables:
    """`int32[slots + 1, max_pages]` on the device, by slot; NULL where a request has no page yet.

    The last row is that of slot NULL, which torch's negative index finds: it stays NULL.

    Written in step order on the stream that runs the steps, so that a step in flight never sees the table
    of a later one.
    """

    def __init__(self, slots: int, max_pages: int, device: torch.device | str = "cpu") -> None:
        self.entries = torch.full((slots + 1, max_pages), NULL, dtype=torch.int32, device=device)

    def clear(self, slots: Iterable[int]) -> None:
        """Forget what earlier requests had in these slots."""
        for slot in slots:
            self.entries[slot].fill_(NULL)

    def apply(self, writes: Iterable[PageWrite]) -> None:
        """Set the entries of one step."""
        rows = list(writes)
        if not rows:
            return
        device = self.entries.device
        slot, index, page = (
            torch.tensor([getattr(row, name) for row in rows], device=device)
            for name in ("slot", "index", "page")
        )
        self.entries[slot, index] = page.to(torch.int32)

    def rows(self, slots: torch.Tensor, out: torch.Tensor) -> None:
        """Copy the tables of `slots` int64[R] into `out` int32[R, max_pages]."""
        out.copy_(self.entries[slots])
