"""Host buffers of one step's output, and who may still write to them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from stallwatch_engine.output.answers import StaleOutput


class Landing:
    """Where one step's tensors land. Holds the device's tensors too: another stream reads them.

    Made per step and never reused before the copy has landed: after a timeout the copy may still come.
    """

    def __init__(self, seq: int, sources: Mapping[str, torch.Tensor], *, pinned: bool) -> None:
        self.seq = seq
        self._sources = dict(sources)
        self._targets = {
            name: torch.empty(source.shape, dtype=source.dtype, pin_memory=pinned)
            for name, source in self._sources.items()
        }
        self._stamp = torch.full((1,), -1, dtype=torch.int64, pin_memory=pinned)

    def copy(self) -> None:
        """Enqueue the copies on the current stream; the stamp comes last."""
        device: torch.device | str = "cpu"
        for name, source in self._sources.items():
            self._targets[name].copy_(source, non_blocking=True)
            device = source.device
        stamp = torch.full((1,), self.seq, dtype=torch.int64, device=device)
        self._stamp.copy_(stamp, non_blocking=True)

    def take(self) -> dict[str, torch.Tensor]:
        """The landed tensors. StaleOutput when the stamp says that they have not landed."""
        found = int(self._stamp)
        if found != self.seq:
            raise StaleOutput(self.seq, found)
        return self._targets
