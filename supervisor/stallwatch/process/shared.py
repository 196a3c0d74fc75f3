"""Which shared memory a tree uses: remembered while it lives, removed once nobody maps it."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from stallwatch.process import maps
from stallwatch.process.bounded import bounded
from stallwatch.process.maps import FileId

_KEPT = 4096
_ONE_S = 0.5
_ALL_S = 3.0
_SWEEP_S = 5.0

Files = dict[FileId, str]


class SharedMemory:
    """The /dev/shm files that members were seen to map. Thread-safe.

    A tree that dies by itself maps nothing any more when it is swept: with tensor parallel 2, vLLM
    then leaves 8 MB there (vllm_dist_*). So they are noted while it lives.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: Files = {}
        self._turn = 0

    def note(self, pids: Iterable[int]) -> None:
        """Look at one of the processes, the next one at the next call.

        Costs some ms and may block for half a second: about once a second, never in the judging
        thread.
        """
        order = sorted(pids)
        if order:
            self._turn += 1
            self._remember(_read(order[self._turn % len(order)], seconds=_ONE_S))

    def of(self, pids: Iterable[int], *, besides: FileId | None = None) -> Files:
        """What they map now and what was noted before, `besides` excepted."""
        self._remember(_read(*pids, seconds=_ALL_S))
        with self._lock:
            return {file: name for file, name in self._files.items() if file != besides}

    def _remember(self, found: Files) -> None:
        with self._lock:
            if len(self._files) < _KEPT:
                self._files.update(found)


def _read(*pids: int, seconds: float) -> Files:
    nothing: Files = {}
    return bounded(lambda: maps.shared_memory(pids), seconds, nothing)


def sweep(files: Files) -> tuple[str, ...]:
    """Unlink what nobody maps any more; returns the names. Bounded."""
    nothing: tuple[str, ...] = ()
    return bounded(lambda: maps.unlink_unmapped(files), _SWEEP_S, nothing)


def who_maps(file: FileId, *, ignore: Iterable[int]) -> frozenset[int]:
    """Every process that maps the file. Bounded."""
    nothing: dict[FileId, set[int]] = {}
    found = bounded(lambda: maps.who_maps((file,), ignore=ignore), _ALL_S, nothing)
    return frozenset(found.get(file, ()))


def maps_file(pid: int, file: FileId) -> bool:
    """True when the process maps the file; False also when it cannot be asked in 0.25 s."""
    return bounded(lambda: maps.maps_file(pid, file), _ONE_S / 2, False)
