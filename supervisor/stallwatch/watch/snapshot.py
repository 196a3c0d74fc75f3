"""What the judge sees at one instant: boards, /proc facts, exits, host. Plain immutable values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stallwatch.board.image import BoardImage, ProcessImage
from stallwatch.lifecycle.states import State


@dataclass(frozen=True, slots=True)
class ThreadFacts:
    """One thread in /proc. Read only for processes under suspicion (it costs)."""

    tid: int
    state: str
    cpu_ticks: int
    wchan: str = ""


@dataclass(frozen=True, slots=True)
class ProcFacts:
    """One member process in /proc."""

    pid: int
    start_ticks: int
    ppid: int
    comm: str
    state: str
    cpu_ticks: int
    child_ticks: int
    rss_pages: int
    threads: int
    tracer_pid: int = 0  # read only when the state is t or T, or under suspicion
    read_bytes: int | None = None  # read only while starting, or under suspicion
    written_bytes: int | None = None  # the same; recv(2) is not in read_bytes, downloads show here
    tids: frozenset[int] | None = None  # read when threads changed or lanes are attached
    thread_facts: Mapping[int, ThreadFacts] = field(default_factory=dict)
    minor_faults: int = 0  # cumulative
    major_faults: int = 0  # cumulative: each of them waited for storage


@dataclass(frozen=True, slots=True)
class Exit:
    """A member that ended. status None: reaped by its parent before we could read it."""

    pid: int
    start_ticks: int
    at_ns: int
    root: bool
    status: int | None = None  # exit code when it exited
    signal: int | None = None  # signal number when one killed it
    comm: str = ""
    oom_killed: bool = False
    expected: bool = False  # we asked for it, or it had detached from the board
    ppid: int = 0  # its parent when it joined the engine; 0: not known

    def words(self) -> str:
        """'signal 9 (out of memory)', 'exit status 0', or 'unknown (reaped by its parent)'."""
        if self.signal is not None:
            return f"signal {self.signal}" + (" (out of memory)" if self.oom_killed else "")
        if self.status is not None:
            return f"exit status {self.status}"
        return "unknown (reaped by its parent)"


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Witnesses about the machine: only these may extend a limit."""

    late_ns: int = 0  # how late this look was against its period
    throttled_usec: int | None = None  # cumulative, cpu.stat of the engine's cgroup
    frozen: bool = False  # cgroup frozen
    cpu_full_usec: int | None = None  # cumulative total of PSI cpu "full"


@dataclass(frozen=True, slots=True)
class Silence:
    """A request that the gateway waits for, of an engine that sends no byte to anybody."""

    request: str  # a digest
    phase: str  # first_token, between_tokens, whole_answer
    since_ns: int  # when its last byte came, or when it was sent
    limit_ns: int
    waiting: int = 1  # requests at the gateway
    others_ns: int = 0  # when it last served others than the clients of that gateway; 0: never


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the supervisor itself knows of the engine."""

    name: str
    incarnation: int
    state: State
    root_pid: int = 0
    started_ns: int = 0  # when this incarnation was spawned
    ready_ns: int | None = None
    stop_asked_ns: int | None = None  # a stop or drain is under way since
    stop_grace_ns: int = 0
    side_progress_ns: int = 0  # last time rss, bytes read, children's CPU or work moved
    pid_side_progress_ns: Mapping[int, int] = field(default_factory=dict)  # the same per member
    silence: Silence | None = None  # what the gateway says


@dataclass(frozen=True, slots=True)
class Slow:
    """A lane that works far slower than it did: windows of one length, work done in each."""

    since_ns: int
    windows: int
    work: int  # in the last window
    usual: int  # the median before


@dataclass(frozen=True, slots=True)
class Recall:
    """What only earlier looks can tell (watch.memory fills it; empty: nothing is known).

    `excused` holds, by lane slot, stretches of time that must not count against the lane: a pause
    lease, a debugger, idle time below an outer phase.
    """

    steps: int | None = None  # work counted since READY; None: unknown, no warm-up exemption
    stuck_since_ns: int | None = None  # pending > 0 and no work moved since
    attached: Mapping[int, ProcessImage] = field(default_factory=dict)  # ever seen in the board
    stopped_since_ns: Mapping[int, int] = field(default_factory=dict)  # state T, by pid
    traced_since_ns: Mapping[int, int] = field(default_factory=dict)  # by a foreign tracer, by pid
    excused: Mapping[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    # Last time helpers without lanes (compilers) of a process burnt CPU, by the process's pid.
    compiled_ns: Mapping[int, int] = field(default_factory=dict)
    slow: Mapping[int, Slow] = field(default_factory=dict)  # by lane slot
    held: tuple[tuple[int, int], ...] = ()  # when a lease or a debugger held the engine up


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One look at one engine."""

    now_ns: int
    engine: EngineFacts
    image: BoardImage | None = None  # None: the board could not be read at this look
    processes: Mapping[int, ProcFacts] = field(default_factory=dict)  # living members by pid
    exits: tuple[Exit, ...] = ()  # every exit of this incarnation so far, oldest first
    host: HostFacts = HostFacts()
    recall: Recall = Recall()
