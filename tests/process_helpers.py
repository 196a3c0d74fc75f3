"""What the tests of processes share."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from stallwatch.process.reaper import Reaper, become_subreaper


@contextmanager
def subreaper(owned=None) -> Iterator[Reaper]:
    """This process adopts orphans for the length of one test."""
    assert become_subreaper()
    try:
        yield Reaper(owned)
    finally:
        ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)


class Owned:
    """A registry of Popen pids that a test fills by hand."""

    def __init__(self) -> None:
        self.set: set[int] = set()

    def pids(self):
        return frozenset(self.set)
