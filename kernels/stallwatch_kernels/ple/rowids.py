"""Table rows of packed tokens: each token's n-grams, hashed per head.

A batch is packed: request r owns tokens `query_start_loc[r] : query_start_loc[r + 1]` of `ids`, and
`context[r]` holds the n-1 ids before them, oldest first (the end token where the sequence began).
Walking back from a token, the first end token met hides everything older; the token itself never hides.
Tokens past the last request are padding: they hash as end tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from stallwatch_kernels import warmup
from stallwatch_kernels.admission import Candidate, choose
from stallwatch_kernels.errors import BadIndex, BadMetadata, BadShape
from stallwatch_kernels.jit import kernel
from stallwatch_kernels.ple.layout import NgramLayout
from stallwatch_kernels.pool import SERIAL, RowPool
from stallwatch_kernels.tensors import Array, contiguous

KERNEL = "ple.rowids"
_LEAST_TOKENS = 256  # fewer are hashed sooner than a thread wakes up


@dataclass(frozen=True, slots=True)
class RowIdSpec:
    """The type of ids that a layer hashes, and the layer's layout."""

    layout: NgramLayout
    dtype: torch.dtype = torch.int32


def candidates(spec: RowIdSpec) -> list[Candidate]:
    """The compiled kernel first, torch after it. Hashing always runs on the CPU: the tables lie there."""
    known = spec.dtype in {torch.int32, torch.int64}
    return [("numba", None if known else "reads int32 and int64"), ("torch", None)]


class RowIds:
    """Hashes packed tokens for one PLE layer."""

    def __init__(self, layout: NgramLayout, pool: RowPool = SERIAL) -> None:
        self.layout = layout
        self.heads = layout.numbers.heads
        self.context_len = layout.numbers.ngram_size - 1
        self._eos = layout.numbers.eos
        self._pool = pool
        self.choice = choose(KERNEL, candidates(RowIdSpec(layout)))
        self._multipliers = np.array(layout.multipliers, dtype=np.int64)
        self._primes = np.array(layout.primes, dtype=np.int64)
        self._offsets = np.array(layout.offsets, dtype=np.int64)

    def __call__(
        self,
        ids: torch.Tensor,
        query_start_loc: torch.Tensor,
        context: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """int64[T, H] from ids int32 or int64[T], query_start_loc int32[R+1], context int32[R, n-1].

        Negative ids (placeholders of speculative decoding) count as 0.
        """
        tokens, starts, before = self._arrays(ids, query_start_loc, context)
        if out is None:
            out = torch.empty(len(tokens), self.heads, dtype=torch.int64)
        rows = contiguous(KERNEL, "out", out, torch.int64)
        if rows.shape != (len(tokens), self.heads):
            raise BadShape(KERNEL, "out", f"is {rows.shape}; expected {(len(tokens), self.heads)}")
        if self.choice.impl == "torch":
            out.copy_(reference(self.layout, ids, query_start_loc, context)[0])
            return out
        tables = (self._multipliers, self._primes, self._offsets)

        self._pool.run(
            lambda lo, hi: _hash(tokens, starts, before, *tables, self._eos, rows, lo, hi),
            len(tokens),
            least=_LEAST_TOKENS,
        )
        return out

    def next_context(
        self,
        ids: torch.Tensor,
        query_start_loc: torch.Tensor,
        context: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """int32[R, n-1]: the last n-1 ids of each request after this step; `out` may be `context`."""
        tokens, starts, before = self._arrays(ids, query_start_loc, context)
        if out is None:
            out = torch.empty_like(context)
        after = contiguous(KERNEL, "out", out, torch.int32)
        if after.shape != before.shape:
            raise BadShape(KERNEL, "out", f"is {after.shape}; expected {before.shape}")
        bad = _slide(tokens, starts, before, after)
        if bad >= 0:
            raise BadIndex(KERNEL, f"ids[{bad}]", f"is {tokens[bad]}, and a context holds int32")
        return out

    def _arrays(
        self, ids: torch.Tensor, query_start_loc: torch.Tensor, context: torch.Tensor
    ) -> tuple[Array, Array, Array]:
        tokens = contiguous(KERNEL, "ids", ids, torch.int32, torch.int64)
        starts = contiguous(KERNEL, "query_start_loc", query_start_loc, torch.int32)
        before = contiguous(KERNEL, "context", context, torch.int32)
        if tokens.ndim != 1:
            raise BadShape(KERNEL, "ids", f"is {tokens.shape}; expected one dimension")
        check_starts(KERNEL, starts, len(tokens))
        if before.shape != (len(starts) - 1, self.context_len):
            expected = (len(starts) - 1, self.context_len)
            raise BadShape(KERNEL, "context", f"is {before.shape}; expected {expected}")
        return tokens, starts, before


def check_starts(name: str, starts: Array, tokens: int) -> None:
    """Refuse offsets that do not cut `tokens` packed tokens (or fewer: padding follows) into requests."""
    if starts.ndim != 1 or len(starts) < 1:
        raise BadShape(name, "query_start_loc", f"is {starts.shape}; expected requests + 1 offsets")
    if _rises(starts, tokens):
        return
    if starts[-1] > tokens:
        raise BadMetadata(
            name, "query_start_loc", f"ends at {starts[-1]}, and there are {tokens} tokens"
        )
    raise BadMetadata(name, "query_start_loc", "must start at 0 and never fall")


def reference(
    layout: NgramLayout, ids: torch.Tensor, query_start_loc: torch.Tensor, context: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows int64[T, H], new context int32[R, n-1]) in plain torch, one request after the other."""
    numbers = layout.numbers
    older = numbers.ngram_size - 1
    starts: list[int] = query_start_loc.tolist()
    rows, contexts = [], []
    for request, (lo, hi) in enumerate(pairwise(starts)):
        history = torch.cat([context[request], ids[lo:hi]]).long().clamp_min(0)
        rows.append(_reference_rows(layout, history))
        contexts.append(history[len(history) - older :])
    padding = len(ids) - starts[-1]
    if padding:
        alone = torch.full((older + 1,), numbers.eos, dtype=torch.int64)
        rows.append(_reference_rows(layout, alone).expand(padding, -1))
    hashed = torch.cat(rows) if rows else torch.empty(0, numbers.heads, dtype=torch.int64)
    if not contexts:
        return hashed, context.clone()
    return hashed, torch.stack(contexts).to(torch.int32)


def _reference_rows(layout: NgramLayout, history: torch.Tensor) -> torch.Tensor:
    """Rows of all but the first n-1 ids of one request's history."""
    numbers = layout.numbers
    older = numbers.ngram_size - 1
    tokens = len(history) - older
    seen = torch.zeros(tokens, dtype=torch.bool)
    mixed = history[older:] * layout.multipliers[0]
    blocks = []
    for shift in range(1, older + 1):
        earlier = history[older - shift : older - shift + tokens]
        seen |= earlier == numbers.eos
        earlier = torch.where(seen, numbers.eos, earlier)
        mixed = mixed ^ (earlier * layout.multipliers[shift])  # int64 wraps, as the model's does
        heads = slice((shift - 1) * numbers.heads_per_ngram, shift * numbers.heads_per_ngram)
        primes = torch.tensor(layout.primes[heads])
        blocks.append(torch.remainder(mixed[:, None], primes) + torch.tensor(layout.offsets[heads]))
    return torch.cat(blocks, dim=1)


@kernel
def _rises(starts: Array, limit: int) -> bool:
    """Whether offsets go from 0 to at most `limit` and never fall."""
    rising = starts[0] == 0
    for request in range(1, len(starts)):
        rising &= starts[request - 1] <= starts[request]
    return bool(rising and starts[-1] <= limit)


@kernel
def _hash(  # noqa: PLR0913, PLR0917 - a compiled kernel takes what it reads
    ids: Array,
    starts: Array,
    context: Array,
    multipliers: Array,
    primes: Array,
    offsets: Array,
    eos: int,
    rows: Array,
    lo: int,
    hi: int,
) -> None:
    requests = len(starts) - 1
    older = len(multipliers) - 1
    per_order = len(primes) // older
    request = 0
    for t in range(lo, hi):
        while request < requests and t >= starts[request + 1]:
            request += 1
        padding = request == requests
        token = np.int64(eos) if padding else max(np.int64(ids[t]), np.int64(0))
        mixed = token * multipliers[0]
        hidden = padding
        for shift in range(1, older + 1):
            earlier = np.int64(eos)
            if not hidden:
                place = t - shift - starts[request]
                if place >= 0:
                    earlier = max(np.int64(ids[t - shift]), np.int64(0))
                else:
                    earlier = max(np.int64(context[request, older + place]), np.int64(0))
                hidden = earlier == eos
            mixed ^= earlier * multipliers[shift]
            for head in range((shift - 1) * per_order, shift * per_order):
                left = mixed % primes[head]  # Python's modulo: never negative
                rows[t, head] = offsets[head] + left


@kernel
def _slide(ids: Array, starts: Array, before: Array, after: Array) -> int:
    requests, older = before.shape
    for t in range(starts[requests]):
        if ids[t] > 2147483647:
            return t
    for request in range(requests):
        lo, hi = starts[request], starts[request + 1]
        for place in range(older):
            source = hi - older + place
            if source >= lo:
                after[request, place] = max(np.int64(ids[source]), np.int64(0))
            else:  # reading right of where it writes: `after` may be `before`
                kept = before[request, place + hi - lo]
                after[request, place] = max(np.int64(kept), np.int64(0))
    return -1


@warmup.of(RowIdSpec)
def tasks(spec: RowIdSpec, shapes: warmup.Shapes) -> Iterable[warmup.Task]:  # noqa: ARG001
    """Hash one token and move one context on: the kernels know no shapes."""

    def run() -> None:
        hasher = RowIds(spec.layout)
        ids, starts = torch.zeros(1, dtype=spec.dtype), torch.tensor([0, 1], dtype=torch.int32)
        context = torch.zeros(1, hasher.context_len, dtype=torch.int32)
        hasher(ids, starts, context)
        hasher.next_context(ids, starts, context)

    yield warmup.Task(f"{KERNEL} {str(spec.dtype).removeprefix('torch.')}", run)
