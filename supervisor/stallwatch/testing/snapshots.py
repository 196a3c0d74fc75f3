"""Builders of snapshots: seconds in, defaults for the rest. For tests of every pure part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stallwatch.board.image import (
    BoardImage,
    LaneClass,
    LaneImage,
    PauseLease,
    PhaseFrame,
    ProcessImage,
)
from stallwatch.lifecycle.states import State
from stallwatch.watch.snapshot import EngineFacts, ProcFacts, Recall, Snapshot

T0 = 1000.0  # where stories begin, in seconds of the monotonic clock


def ns(seconds: float) -> int:
    return int(seconds * 1e9)


def frame(
    name: str = "execute_model",
    cls: LaneClass = LaneClass.WORK,
    *,
    at: float = T0,
    progress: float | None = None,
    limit: float = 0.0,
) -> PhaseFrame:
    """A phase entered at `at`; progress defaults to the same moment."""
    return PhaseFrame(name, cls, ns(at), ns(at if progress is None else progress), ns(limit))


def lane(
    name: str = "model",
    *stack: PhaseFrame,
    role: str = "worker",
    rank: int = 0,
    pid: int = 100,
    **fields: Any,
) -> LaneImage:
    """A lane; without frames it idles. Its tid defaults to its pid, its slot to its name's hash."""
    values: dict[str, Any] = {
        "slot": sum(f"{role}{rank}{name}".encode()) * 8 + len(name),
        "tid": pid,
        "start_ticks": 1,
        "channel": False,
        "beats": 1,
        "work": 0,
        "wait_on": "",
        **fields,
    }
    return LaneImage(
        pid=pid,
        role=role,
        rank=rank,
        name=name,
        stack=stack or (frame("idle", LaneClass.IDLE),),
        **values,
    )


def process(role: str = "worker", rank: int = 0, *, pid: int = 100, **fields: Any) -> ProcessImage:
    """An attached process; ready and with nothing pending by default."""
    values: dict[str, Any] = {
        "slot": pid,
        "start_ticks": 1,
        "ready": True,
        "pending": 0,
        "attached_ns": ns(T0),
        **fields,
    }
    return ProcessImage(pid=pid, role=role, rank=rank, **values)


def lease(*, at: float = T0, seconds: float = 60.0, owner: str = "trainer") -> PauseLease:
    return PauseLease("weight_update", owner, ns(at), ns(at + seconds))


def facts(pid: int = 100, **fields: Any) -> ProcFacts:
    """A living, sleeping process in /proc."""
    values: dict[str, Any] = {
        "start_ticks": 1,
        "ppid": 1,
        "comm": "python",
        "state": "S",
        "cpu_ticks": 0,
        "child_ticks": 0,
        "rss_pages": 1000,
        "threads": 1,
        **fields,
    }
    return ProcFacts(pid=pid, **values)


def engine(state: State = State.READY, *, started: float = T0 - 100, **fields: Any) -> EngineFacts:
    values: dict[str, Any] = {
        "name": "chat",
        "incarnation": 1,
        "root_pid": 100,
        "started_ns": ns(started),
        "ready_ns": None if state is State.STARTING else ns(started + 1),
        **fields,
    }
    return EngineFacts(state=state, **values)


def snapshot(
    at: float,
    lanes: Iterable[LaneImage] = (),
    *,
    processes: Iterable[ProcessImage] | None = None,
    procs: Iterable[ProcFacts] | None = None,
    engine: EngineFacts = engine(),  # noqa: B008 - immutable
    moving: tuple[str, ...] = (),
    **fields: Any,
) -> Snapshot:
    """A look at `at`. Processes and /proc facts default to one for each pid among the lanes."""
    lanes = tuple(lanes)
    owners = {one.pid: one for one in lanes}
    if processes is None:
        processes = [process(one.role, one.rank, pid=pid) for pid, one in owners.items()]
    processes = tuple(processes)
    if procs is None:
        pids = {*owners, *(p.pid for p in processes)}
        procs = [facts(pid, tids=frozenset(o.tid for o in lanes if o.pid == pid)) for pid in pids]
    values: dict[str, Any] = {
        "image": BoardImage(engine.incarnation, ns(at), processes, lanes, moving),
        "processes": {one.pid: one for one in procs},
        "recall": Recall(steps=1000),
        **fields,
    }
    return Snapshot(now_ns=ns(at), engine=engine, **values)
