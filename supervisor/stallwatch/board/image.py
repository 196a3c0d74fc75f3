"""What one reading of a board says. Plain values: nothing here points back into shared memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum


class LaneClass(IntEnum):
    """What kind of stretch a lane is in (heartbeat ABI 1)."""

    IDLE = 0  # waiting for work: no limit
    WORK = 1
    WAIT = 2  # blocked on a named lane
    START = 3  # load, compile, capture, warm-up
    PAUSE = 4
    STOP = 5


@dataclass(frozen=True, slots=True)
class PhaseFrame:
    """One level of a lane's phase stack; times are CLOCK_MONOTONIC ns, limit 0 means none given."""

    name: str
    cls: LaneClass
    entered_ns: int
    progress_ns: int
    limit_ns: int


@dataclass(frozen=True, slots=True)
class LaneImage:
    """One lane: one line of progress with one writer."""

    slot: int
    pid: int
    tid: int
    start_ticks: int
    role: str
    rank: int
    name: str
    channel: bool  # virtual lane of a device queue: no thread of its own
    stack: tuple[PhaseFrame, ...]  # outermost first, never empty; the last is the current phase
    beats: int
    work: int
    wait_on: str  # lane address it waits for, or ""
    details: tuple[tuple[str, int], ...] = ()
    text: str = ""
    torn: bool = False  # writer stopped inside an update: this is the last good copy
    closed: bool = False
    too_deep: int = 0  # phases entered beyond depth 4

    @property
    def address(self) -> str:
        return f"{self.role}:{self.rank}/{self.name}"

    @property
    def phase(self) -> PhaseFrame:
        return self.stack[-1]


@dataclass(frozen=True, slots=True)
class PauseLease:
    """A declared pause: it raises limits until it ends, it never mutes."""

    name: str
    owner: str
    entered_ns: int
    until_ns: int


@dataclass(frozen=True, slots=True)
class ProcessImage:
    """One attached process."""

    slot: int
    pid: int
    start_ticks: int
    role: str
    rank: int
    ready: bool
    pending: int
    attached_ns: int
    detached: bool = False  # it said goodbye: its exit is expected
    pause: PauseLease | None = None
    dump_signal: int = 0  # faulthandler signal it registered, 0: none
    dump_path: str = ""

    @property
    def address(self) -> str:
        return f"{self.role}:{self.rank}"


@dataclass(frozen=True, slots=True)
class BoardImage:
    """All lanes and processes at one look."""

    incarnation: int
    taken_ns: int
    processes: tuple[ProcessImage, ...] = ()
    lanes: tuple[LaneImage, ...] = ()
    moving: tuple[str, ...] = ()  # lanes never stable in three tries: they are alive and writing
    problems: tuple[str, ...] = field(default=())  # what was refused while decoding, sanitised

    def lane(self, address: str) -> LaneImage | None:
        return next((lane for lane in self.lanes if lane.address == address), None)
