"""What holds for every test: how hard hypothesis tries, and that a session leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

from stallwatch import procfs
from stallwatch.heartbeat import layout
from stallwatch.heartbeat.memory import read_header

# `HYPOTHESIS_PROFILE=thorough make test-unit` before a release; the default keeps the suite short.
settings.register_profile("quick", max_examples=30, deadline=None)
settings.register_profile(
    "thorough", max_examples=500, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

SHM = Path("/dev/shm")
_PATIENCE_S = 5.0
_OTHERS_S = 45.0


def _boards() -> set[str]:
    return {path.name for path in SHM.glob("stallwatch-*")}


def _orphaned(name: str) -> bool:
    """Nobody removes this board any more: its maker is gone, or is this very process."""
    try:
        fields = read_header((SHM / name / layout.BOARD_FILE).read_bytes()[: layout.HEADER_SIZE])
    except OSError:
        return (SHM / name).exists()
    if fields is None:
        return True
    pid, ticks = fields["supervisor_pid"], fields["supervisor_ticks"]
    return pid == os.getpid() or not procfs.is_alive(pid, ticks)


def _children() -> set[int]:
    """Living ones: a zombie that a test's reaper has not met yet holds nothing."""
    found: set[int] = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:
                found.add(child.pid)
    return found


def _threads() -> set[str]:
    return {t.name for t in threading.enumerate() if not t.daemon} - {"MainThread"}


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """No process, no thread and no board outlives the session; boards of others that live are theirs."""
    boards = _boards()
    yield
    deadline = time.monotonic() + _PATIENCE_S
    while (_children() or _threads()) and time.monotonic() < deadline:
        time.sleep(0.05)  # a poll with a deadline
    assert not _children(), f"processes left: {_children()}"
    assert not _threads(), f"threads left: {_threads()}"
    left = {name for name in _boards() - boards if _orphaned(name)}
    # A test of another worker may just have killed its daemon: it has this long to clean up.
    deadline = time.monotonic() + _OTHERS_S
    while left and time.monotonic() < deadline:
        time.sleep(0.2)  # a poll with a deadline
        left = {name for name in left & _boards() if _orphaned(name)}
    assert not left, f"boards left: {left}"
