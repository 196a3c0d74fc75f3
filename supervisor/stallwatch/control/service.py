"""What the control plane may ask of the daemon. HTTP, metrics and CLI know nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

from stallwatch.lifecycle.states import State


class _AsObject:
    """Pairs that JSON shows as one object. Pydantic asks for this by its name: we import nothing of it."""

    @staticmethod
    def __get_pydantic_json_schema__(_core: object, _handler: object) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": {"type": "integer"}}


@dataclass(frozen=True, slots=True)
class LaneView:
    """A lane as an operator reads it."""

    address: str
    cls: str  # idle, work, wait, start, pause, stop
    phase: str
    age_s: float  # since the phase was entered or last progressed
    limit_s: float  # 0: none
    beats: int
    work: int
    pid: int
    tid: int
    wait_on: str = ""
    text: str = ""
    details: Annotated[tuple[tuple[str, int], ...], _AsObject] = ()
    channel: bool = False
    torn: bool = False


@dataclass(frozen=True, slots=True)
class ProcessView:
    address: str  # "worker:0", or "pid:123" for a member that never attached
    pid: int
    state: str  # R S D T t Z
    ready: bool
    pending: int
    attached: bool
    comm: str = ""
    rss_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine as an operator reads it. Times are RFC 3339 strings or ''."""

    name: str
    state: State
    wanted: bool
    up: bool
    ready: bool
    enforce: str
    incarnation: int
    root_pid: int
    port: int | None
    command: tuple[str, ...]  # already redacted
    restarts_in_window: int
    budget: int
    backoff_s: float  # seconds until the next start, 0 when none is due
    started_at: str
    ready_at: str
    reason: str  # one sentence: why it is in this state
    last_stall: str  # id or ""
    processes: tuple[ProcessView, ...] = ()
    lanes: tuple[LaneView, ...] = ()
    members: int = 0
    log_dropped: int = 0
    top_frame: str = ""  # the culprit's frame of the last stall
    age_s: float = 0.0  # seconds in this state
    exhausted_reason: str = ""
    role: str = "engine"  # or "gateway": supervised like one, and serving nothing by itself
    clients: str = ""  # where its clients connect: the gateway's address, or its own port's
    comes_back: bool = False  # it is down, and will be started again without anybody's help


@dataclass(frozen=True, slots=True)
class Liveness:
    """Our own loops. live is what /livez answers."""

    live: bool
    loops: tuple[tuple[str, float], ...] = ()  # (name, seconds since it last turned)
    detail: str = ""
    reports: str = ""  # why new reports are in memory only; '' when they are on disk


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened; ids grow by one, and those of a later daemon are above all others."""

    id: int
    at: str  # RFC 3339
    engine: str
    type: str  # state, warn, suspect, withdrawn, stall, failure, exit, restart, budget, log, ...
    message: str
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals since the daemon started, read at scrape time."""

    stalls: dict[tuple[str, str], int] = field(default_factory=dict)  # (engine, kind)
    restarts: dict[tuple[str, str], int] = field(default_factory=dict)  # (engine, reason kind)
    withdrawn: dict[str, int] = field(default_factory=dict)  # engine
    exits: dict[str, int] = field(default_factory=dict)
    captures: dict[tuple[str, str], int] = field(default_factory=dict)  # (engine, rung)
    log_dropped: dict[str, int] = field(default_factory=dict)  # lines
    extensions: dict[str, int] = field(default_factory=dict)  # limits extended by a host witness
    repeated: dict[tuple[str, str], int] = field(default_factory=dict)  # (engine, kind)
    looks: int = 0
    late_looks: int = 0
    detection_s: list[tuple[str, float]] = field(default_factory=list)  # drained by the scrape
    answer_s: list[tuple[str, float]] = field(default_factory=list)


class Service(Protocol):
    """Implemented by the daemon; by `stallwatch.testing.FakeService` in tests.

    Every method is safe to call from any thread and returns at once, `stacks` and `chaos`
    excepted (bounded by 15 s). Unknown names raise UnknownEngine.
    """

    def engines(self) -> Sequence[EngineView]: ...
    def engine(self, name: str) -> EngineView: ...
    def liveness(self) -> Liveness: ...
    def counters(self) -> Counters: ...
    def restart(self, name: str, *, who: str) -> str:
        """Ask for a restart (resets EXHAUSTED and UNKILLABLE too); returns a sentence."""
        ...

    def drain(self, name: str, *, who: str) -> str: ...
    def pause(self, name: str, *, seconds_: float, who: str) -> str:
        """A lease on the engine's limits: it raises them until it ends."""
        ...

    def chaos(
        self, name: str, *, fault: str, on: str, seed: int, seconds_: float, who: str
    ) -> dict[str, Any]:
        """Inject a fault, if the configuration allows it; what was done. Blocks up to 5 s."""
        ...

    def stacks(self, name: str, *, native: bool = False) -> dict[str, Any]:
        """Take stacks now. {"processes": [...], "rung": ...} as in a report; blocks, bounded."""
        ...

    def logs(self, name: str, *, lines: int = 100) -> Sequence[str]: ...
    def stalls(
        self, *, limit: int = 100, engine: str | None = None, offset: int = 0
    ) -> Sequence[dict[str, Any]]:
        """Summaries, newest first: id, engine, incarnation, kind, culprit, detected_at, action.

        `offset` of the newest are left out.
        """
        ...

    def stall(self, stall_id: str) -> dict[str, Any]:
        """The whole report (keys: docs/http.md). Unknown id: UnknownEngine."""
        ...

    def artefacts(self, stall_id: str) -> Sequence[str]:
        """Paths of the files kept for one stall (for `dump`)."""
        ...

    def events(self, *, after: int = 0, limit: int = 1000) -> Sequence[Event]:
        """Events with id > after, oldest first, from a bounded ring."""
        ...

    def wait_events(self, after: int, timeout_s: float) -> Sequence[Event]:
        """Like events(), but blocks until there is one or the time is over."""
        ...
