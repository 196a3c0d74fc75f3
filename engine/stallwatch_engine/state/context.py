"""The last n-1 token ids of every request, on the device: what an n-gram reads before a step's first token.

They must live there, because a step that runs ahead consumes ids that the host has not seen.
"""

from __future__ import annotations

import torch


class TokenContext:
    """`ids int32[slots + 1, n - 1]`, oldest first; end tokens before a request's first token.

    The last row is that of slot NULL, which torch's negative index finds: padding rows write there.
    """

    def __init__(
        self, slots: int, older: int, *, eos: int, device: torch.device | str = "cpu"
    ) -> None:
        self._eos = eos
        self.ids = torch.full((slots + 1, older), eos, dtype=torch.int32, device=device)

    def begin(self, slots: torch.Tensor) -> None:
        """Requests start in `slots` int64[R]."""
        self.ids.index_fill_(0, slots, self._eos)

    def rows(self, slots: torch.Tensor, out: torch.Tensor) -> None:
        """Copy the contexts of `slots` int64[R] into `out` int32[R, n - 1]."""
        out.copy_(self.ids[slots])

    def advance(
        self, slots: torch.Tensor, query_start_loc: torch.Tensor, ids: torch.Tensor
    ) -> None:
        """Append each request's ids of a step: slots int64[R], query_start_loc int32[R + 1], ids int32[T].

        After the step's context was copied out: the old one is gone.
        """
        older = self.ids.shape[1]
        starts = query_start_loc[:-1].to(torch.int64)
        counts = query_start_loc[1:].to(torch.int64) - starts
        # place in (context, then this step's ids) of the last n - 1 ids
        place = counts[:, None] + torch.arange(older, device=self.ids.device)
        before = self.ids[slots]
        kept = before.gather(1, place.clamp(max=older - 1))
        fresh = (starts[:, None] + place - older).clamp(min=0)
        self.ids[slots] = torch.where(place < older, kept, ids[fresh].to(torch.int32))
