"""Rows over threads: each kernel takes `lo, hi` and computes those rows alone.

A row's bits cannot depend on the cut, because no kernel carries anything from one row to the next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise

from stallwatch_kernels.errors import Busy

RowKernel = Callable[[int, int], object]


class RowPool:
    """A fixed number of threads. With one thread everything runs in the caller."""

    def __init__(self, threads: int = 1) -> None:
        if threads < 1:
            raise ValueError(f"a row pool needs at least one thread, got {threads}")
        self.threads = threads
        self._pool = (
            ThreadPoolExecutor(threads - 1, thread_name_prefix="rows") if threads > 1 else None
        )

    def run(self, work: RowKernel, rows: int, *, least: int = 1) -> None:
        """Call `work(lo, hi)` over all rows, in parts of at least `least` rows. Re-raises its first error."""
        parts = min(self.threads, max(1, rows // max(1, least)))
        if self._pool is None or parts == 1:
            if rows:
                work(0, rows)
            return
        cuts = [rows * part // parts for part in range(parts + 1)]
        others: list[Future[object]] = [
            self._pool.submit(work, lo, hi) for lo, hi in pairwise(cuts[1:])
        ]
        try:
            work(cuts[0], cuts[1])
        finally:
            for other in others:  # nothing may still write when the caller sees an error
                other.exception()
        for other in others:
            other.result()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


SERIAL = RowPool(1)


class OneAtATime:
    """A guard of buffers that serve one call at a time: a second thread is refused, never mixed in."""

    def __init__(self, kernel: str) -> None:
        self._kernel = kernel
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise Busy(self._kernel)

    def __exit__(self, *_raised: object) -> None:
        self._lock.release()
