"""One start of an engine that fails half-way, in this process: what was made is taken back."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from process_helpers import subreaper
from stallwatch import procfs
from stallwatch.clock import SystemClock
from stallwatch.config.load import build
from stallwatch.daemon import incarnation as module
from stallwatch.daemon.events import EventRing
from stallwatch.daemon.incarnation import Incarnation
from stallwatch.evidence.tool import ToolRegistry
from stallwatch.process.output import OutputPump, Ring

pytestmark = pytest.mark.process


@pytest.fixture
def reaper():
    with subreaper() as it:
        yield it


def runner(state: Path, reaper: Any, name: str) -> Any:
    """As much of a runner as a start needs."""
    tables = {
        "supervisor": {"state_dir": str(state)},
        "engines": {name: {"command": ["sleep", "1000"]}},
    }
    config = build(tables, source="")
    clock = SystemClock()
    parts = SimpleNamespace(
        config=config,
        clock=clock,
        state_dir=state,
        events=EventRing(clock),
        tools=ToolRegistry(),
        reaper=reaper,
        judge=SimpleNamespace(latest=lambda _: None),
        stderr=None,
        desk=None,
    )
    return SimpleNamespace(config=config.engines[name], parts=parts)


def test_a_tree_that_nobody_can_follow_is_ended_and_leaves_nothing(tmp_path, reaper, monkeypatch):
    """No thread for its output (pids.max): no process, no zombie, no board, no folder, no file, no fd."""
    state, temporary = tmp_path / "state", tmp_path / "tmp"
    (state / "logs").mkdir(parents=True)
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    name = f"t{os.getpid()}-half"
    before = len(os.listdir("/proc/self/fd"))

    def no_thread(*_: Any, **__: Any) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(module, "OutputPump", no_thread)
    fresh = Incarnation(name, 1, runner(state, reaper, name))
    with pytest.raises(RuntimeError, match="can't start new thread"):
        fresh.start()
    fresh.close()

    assert procfs.stat(fresh.root_pid) is None
    assert list(Path("/dev/shm").glob(f"stallwatch-{name}-*")) == []
    assert os.listdir(temporary) == []
    assert [p.name for p in state.iterdir()] == ["logs"]
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_pump_that_cannot_start_takes_nothing_with_it(tmp_path, monkeypatch):
    """The pipe stays the caller's, the other descriptors and the writer's thread are given back."""
    read, write = os.pipe()
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    start = threading.Thread.start

    def no_thread(self: threading.Thread) -> None:
        if self.name == "engine-output":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(RuntimeError):
        OutputPump(read, ring=Ring(), file=str(tmp_path / "engine.log"))
    assert len(os.listdir("/proc/self/fd")) == before
    assert threading.active_count() == threads
    os.close(read)
    os.close(write)
