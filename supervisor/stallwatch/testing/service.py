"""A service in memory: what the control plane sees when there is no daemon."""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from stallwatch.control.service import (
    Counters,
    EngineView,
    Event,
    LaneView,
    Liveness,
    ProcessView,
)
from stallwatch.errors import UnknownEngine
from stallwatch.lifecycle.states import SERVING, State

AT = "2026-11-30T03:15:02Z"
RING = 10000


def engine_view(name: str = "chat", state: State = State.READY, **changes: Any) -> EngineView:
    """A plausible engine in `state`."""
    view = EngineView(
        name=name,
        state=state,
        wanted=state is not State.STOPPED,
        up=state in SERVING or state is State.STARTING,
        ready=state in SERVING,
        enforce="restart",
        incarnation=1,
        root_pid=4242,
        port=8001,
        clients="http://127.0.0.1:8001",
        command=("vllm", "serve", "MODEL", "--port", "8001"),
        restarts_in_window=0,
        budget=5,
        backoff_s=0.0,
        started_at=AT,
        ready_at=AT if state in SERVING else "",
        reason="",
        last_stall="",
        processes=(
            ProcessView("api:0", 4242, "S", ready=True, pending=1, attached=True, comm="python"),
            ProcessView("worker:0", 4243, "S", ready=True, pending=2, attached=True),
        ),
        lanes=(
            LaneView(
                "worker:0/model", "work", "execute_model", 0.4, 60.0, 120, 118, 4243, 4243,
                details=(("step", 118), ("requests", 3)),
            ),
            LaneView("worker:0/output", "idle", "idle", 0.4, 0.0, 119, 0, 4243, 4250),
        ),
        members=2,
        age_s=192.0,
    )  # fmt: skip
    return dataclasses.replace(view, **changes)


def stall_report(stall_id: str, engine: str = "chat", kind: str = "DEVICE_WAIT") -> dict[str, Any]:
    """A report with the keys of docs/http.md."""
    return {
        "schema": 1,
        "id": stall_id,
        "engine": engine,
        "incarnation": 1,
        "kind": kind,
        "kinds": [kind],
        "confidence": "high",
        "summary": f"worker:0 waits for the accelerator in execute_model [{stall_id}]",
        "culprit": {
            "process": "worker:0",
            "role": "worker",
            "rank": 0,
            "pid": 4243,
            "lane": "worker:0/model",
            "phase": "execute_model",
            "thread": "MainThread",
            "frame": "synchronize (model_runner.py:812)",
        },
        "elapsed_s": 60.1,
        "limit_s": 60.0,
        "action": "restart",
        "detected_at": AT,
        "rung": "py-spy",
        "processes": [],
        "stacks": [],
        "stack_tree": {},
        "wait_graph": {"edges": [], "reasons": []},
        "host": {},
        "gpu": {},
        "logs": {"tail": ["INFO step 118"]},
        "requests": {},
        "timeline": [],
    }


class FakeService:
    """Implements Service. Tests change it through its attributes and `emit`."""

    def __init__(self, engines: Sequence[EngineView] | None = None) -> None:
        self._lock = threading.Condition()
        self.views = {v.name: v for v in (engines if engines is not None else [engine_view()])}
        self.live = Liveness(live=True, loops=(("judge", 0.05), ("main", 0.1)))
        self.counts = Counters()
        self.reports: dict[str, dict[str, Any]] = {}
        self.files: dict[str, list[str]] = {}
        self.lines = ["line 1", "line 2"]
        self.asked: list[tuple[Any, ...]] = []
        self.before: Callable[[str], None] = lambda _: None  # called with the method's name
        self._ring: deque[Event] = deque(maxlen=RING)
        self._last = 0

    def set(self, view: EngineView) -> None:
        with self._lock:
            self.views[view.name] = view

    def emit(self, type_: str, message: str, *, engine: str = "chat", **data: Any) -> Event:
        """One more event."""
        with self._lock:
            self._last += 1
            event = Event(self._last, AT, engine, type_, message, data)
            self._ring.append(event)
            self._lock.notify_all()
            return event

    def engines(self) -> Sequence[EngineView]:
        self.before("engines")
        with self._lock:
            return [dataclasses.replace(v, lanes=(), processes=()) for v in self.views.values()]

    def engine(self, name: str) -> EngineView:
        self.before("engine")
        with self._lock:
            if name not in self.views:
                known = ", ".join(sorted(self.views)) or "(none)"
                raise UnknownEngine(f"no engine {name!r}", hint=f"engines: {known}")
            return self.views[name]

    def liveness(self) -> Liveness:
        self.before("liveness")
        return self.live

    def counters(self) -> Counters:
        self.before("counters")
        with self._lock:
            now = self.counts
            self.counts = dataclasses.replace(now, detection_s=[], answer_s=[])
            return now

    def restart(self, name: str, *, who: str) -> str:
        self.engine(name)
        self.asked.append(("restart", name, who))
        return f"{name} restarts: incarnation 2 is being started"

    def drain(self, name: str, *, who: str) -> str:
        self.engine(name)
        self.asked.append(("drain", name, who))
        return f"{name} drains and then stops"

    def pause(self, name: str, *, seconds_: float, who: str) -> str:
        self.engine(name)
        self.asked.append(("pause", name, seconds_, who))
        return f"{name}: limits are raised for {seconds_:g} s"

    def stacks(self, name: str, *, native: bool = False) -> dict[str, Any]:
        view = self.engine(name)
        self.before("stacks")
        rung = "py-spy-native" if native else "py-spy"
        thread = {"tid": 4243, "name": "MainThread", "frames": ["wait (threading.py:320)"]}
        return {
            "rung": rung,
            "processes": [
                {"address": p.address, "pid": p.pid, "state": p.state, "rung": rung, "problems": []}
                for p in view.processes
            ],
            "stacks": [
                {"process": p.address, "pid": p.pid, "sample": 0, "threads": [thread]}
                for p in view.processes
            ],
            "stack_tree": {},
        }

    def chaos(
        self, name: str, *, fault: str, on: str, seed: int, seconds_: float, who: str
    ) -> dict[str, Any]:
        self.engine(name)
        self.asked.append(("chaos", name, fault, on, seed, seconds_, who))
        return {
            "engine": name, "fault": fault, "process": "worker:0", "role": "worker",
            "lane": "model", "pid": 4243, "seed": seed, "seconds": seconds_ or 70.0,
            "began_at": AT, "incarnation": 1,
        }  # fmt: skip

    def logs(self, name: str, *, lines: int = 100) -> Sequence[str]:
        self.engine(name)
        return self.lines[-lines:]

    def stalls(
        self, *, limit: int = 100, engine: str | None = None, offset: int = 0
    ) -> Sequence[dict[str, Any]]:
        keys = ("id", "engine", "incarnation", "kind", "culprit", "detected_at", "action")
        newest = reversed(self.reports.values())
        found = [{k: r[k] for k in keys} for r in newest if engine in (None, r["engine"])]
        return found[offset : offset + limit]

    def stall(self, stall_id: str) -> dict[str, Any]:
        self.before("stall")
        if stall_id not in self.reports:
            raise UnknownEngine(f"no stall {stall_id}", hint="`stallwatch stalls` lists them")
        return self.reports[stall_id]

    def artefacts(self, stall_id: str) -> Sequence[str]:
        self.stall(stall_id)
        return self.files.get(stall_id, [])

    def events(self, *, after: int = 0, limit: int = 1000) -> Sequence[Event]:
        self.before("events")
        with self._lock:
            return [event for event in self._ring if event.id > after][:limit]

    def wait_events(self, after: int, timeout_s: float) -> Sequence[Event]:
        with self._lock:
            self._lock.wait_for(lambda: self._last > after, timeout_s)
        return self.events(after=after)
