"""A process's side of the board: lanes, readiness, pending work, and what the supervisor says."""

from __future__ import annotations

import os
import struct
import threading
import time
import weakref
from collections.abc import Callable

from stallwatch.heartbeat import claims, evidence, layout
from stallwatch.heartbeat.lane import Lane, limit_ns
from stallwatch.heartbeat.memory import BoardMemory
from stallwatch.heartbeat.names import NameTable, clip
from stallwatch.heartbeat.slot import ProcessSlot

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing failure costs 5 ms of typing
    from stallwatch.heartbeat.failure import Failure

Role = str | Callable[[], "str | tuple[str, int]"]


LATE = -1  # thread id of a lane that waits for its first mark


class Board:
    """Made by heartbeat.attach(). Without a usable board every method still works and says nothing."""

    def __init__(self, memory: BoardMemory | None, role: Role, rank: int, dump_signal: int) -> None:
        self._memory = memory
        self._role = role
        self._rank = rank
        self._dump_signal = dump_signal
        self._slot = ProcessSlot()
        self._names = NameTable()
        self._lanes: list[Lane] = []
        self._pauses: list[Pause] = []
        self._lock = threading.RLock()
        self._failure: tuple[int, Failure] | None = None
        self.closed = False
        self._lost = memory is None  # no slot for this process: say nothing, try nothing again
        _boards.add(self)
        if not callable(role):
            self._attach()

    @property
    def attached(self) -> bool:
        """True when the supervisor can see this process."""
        return self._slot.index >= 0

    def become(self, role: Role, rank: int) -> None:
        """Another role, as long as nothing was said under the first one: for a forked child."""
        with self._lock:
            if self._lost or self.attached:
                return
            self._role, self._rank = role, rank
            if not callable(role):
                self._attach()

    def lane(self, name: str, *, late: bool = False) -> Lane:
        """The line of progress of this thread under that name; asking again returns the same one.

        late: claim the slot at the first mark, in the name of the thread that makes it.
        """
        return self._lane(name, channel=False, late=late)

    def channel(self, name: str, *, late: bool = False) -> Lane:
        """A virtual lane for a device queue or stream, written by the thread that enqueues."""
        return self._lane(name, channel=True, late=late)

    def pending(self, n: int) -> None:
        """A gauge: how much work this process knows to be waiting."""
        if self._slot.index < 0:
            self._attach()
        self._slot.pending(n)

    def ready(self) -> None:
        """Say that this process has finished starting."""
        self._attach()
        self._slot.flag(layout.FLAG_READY)

    def pause(self, name: str, *, seconds: float, owner: str) -> Pause:
        """A context manager: a declared pause, which raises limits until it ends. Never a mute."""
        return Pause(self, (name, owner), limit_ns(seconds))

    def control(self) -> int:
        """The supervisor's control word: CONTROL_FAILED and CONTROL_STOP bits, 0 when it is silent."""
        memory = self._memory
        return 0 if memory is None else memory.words[32]  # CONTROL // 8

    def failure(self) -> Failure | None:
        """The FAILURE declared for this incarnation, or None. Cheap enough to poll."""
        if not self.control() & layout.CONTROL_FAILED:
            return None
        from stallwatch.heartbeat import record  # noqa: PLC0415  (json: 3 ms, needed once)

        assert self._memory is not None
        seq = self._memory.words[layout.FAILURE_SEQ // 8]
        if self._failure is None or self._failure[0] != seq:
            found = record.read(self._memory.bytes)
            if found is None:
                return None
            self._failure = (seq, found)
        return self._failure[1]

    def close(self) -> None:
        """Say goodbye: the exit of this process is expected from now on."""
        with self._lock:
            for lane in list(self._lanes):
                self._close_lane(lane)
            self._slot.flag(layout.FLAG_DETACHED)
            self._lost = self.closed = True
            _boards.discard(self)

    # Inner workings.

    def _attach(self) -> bool:
        with self._lock:
            if self._lost or self.attached:
                return self.attached
            memory = self._memory
            assert memory is not None
            if not self._slot.claim(memory):
                self._lost = True
                return False
            role, rank = self._who()
            evidence.allow_tracing(memory)
            dump = evidence.register_dump(memory, self._dump_signal)
            start = layout.names_offset(memory.processes, memory.lanes, self._slot.index)
            self._names.bind(memory.bytes[start : start + layout.NAMES * layout.NAME_SIZE])
            self._slot.publish(role, rank, dump)
            return True

    def _who(self) -> tuple[str, int]:
        role, rank = self._role, self._rank
        try:
            answer = role() if callable(role) else role
            name, number = (answer, rank) if isinstance(answer, str) else answer
            return str(name), min(max(int(number), -(1 << 31)), (1 << 31) - 1)
        except Exception:  # the engine's function: its faults must not reach the engine's hot path
            return "unknown", 0

    def _lane(self, name: str, *, channel: bool, late: bool) -> Lane:
        with self._lock:
            tid = 0 if channel else threading.get_native_id()
            for lane in self._lanes:
                # A late lane has no thread yet: after a fork that is what its owner asks for again.
                same = lane.tid in {tid, LATE}
                if same and (lane.name, lane.channel) == (name, channel):
                    return lane
            lane = Lane(name, self._names, self._close_lane)
            lane.channel, lane.tid = channel, tid
            if late:
                self._bind_late(lane)
            else:
                self._bind(lane)
            if lane.tid == LATE or lane.cursor.slot >= 0:  # else forgotten: it will never speak
                self._lanes.append(lane)
            return lane

    def _bind_late(self, lane: Lane) -> None:
        def first() -> int:
            lane.cursor.clock = time.monotonic_ns
            try:
                lane.tid = 0 if lane.channel else threading.get_native_id()
                self._bind(lane)
            except Exception:  # runs inside a mark
                lane.cursor.drop()
            return time.monotonic_ns()

        lane.cursor.drop()
        if self._memory is not None:
            lane.tid = LATE
            lane.cursor.clock = first

    def _bind(self, lane: Lane) -> None:
        """Claim a lane slot and publish the lane in its first phase, "attached"."""
        with self._lock:
            if not self._attach():
                return
            memory = self._memory
            assert memory is not None
            slot = claims.claim(memory.claims, "l", memory.lanes)
            if slot < 0:
                return
            start = layout.lane_offset(memory.processes, slot)
            target = memory.bytes[start : start + layout.LANE_SIZE]
            body = self._first_image(lane)
            words, rest, whole = target.cast("l"), target[8:], slice(None)
            generation = time.monotonic_ns()
            words[0] = 0
            rest[whole] = body
            words[0] = generation
            lane.cursor.bind(target)
            lane.cursor.slot = slot

    def _first_image(self, lane: Lane) -> bytes:
        now = time.monotonic_ns()
        flags = layout.LANE_CHANNEL if lane.channel else 0
        image = bytearray(layout.LANE_SIZE)
        struct.pack_into(
            "<IIQIIQQ",
            image,
            layout.L_IDS * 8,
            os.getpid(),
            lane.tid,
            self._slot.ticks,
            self._slot.index,
            flags,
            1,
            lane.cursor.work,
        )
        image[layout.L_NAME : layout.L_NAME + layout.L_NAME_SIZE] = clip(
            lane.name, layout.L_NAME_SIZE
        ).ljust(layout.L_NAME_SIZE, b"\0")
        word = self._names.word("attached", "idle", (), "")
        struct.pack_into("<QQ", image, layout.L_FRAMES * 8, now, word)
        return bytes(image[8:])

    def _close_lane(self, lane: Lane) -> None:
        with self._lock:
            if lane in self._lanes:
                self._lanes.remove(lane)
            c, memory = lane.cursor, self._memory
            c.clock = time.monotonic_ns
            slot, c.slot = c.slot, -1
            if memory is None or slot < 0:
                return
            c.m[layout.L_OWNER] |= layout.LANE_CLOSED << 32
            c.drop()
            claims.release(memory.claims, "l", slot)

    def _after_fork(self) -> None:
        """In the child: nothing of the parent's slots may be written; each lane claims its own."""
        self._lock = threading.RLock()
        self._slot.forget()
        self._names.bind(None)
        self._pauses.clear()
        if self._memory is not None:
            self._lost = False
        for lane in self._lanes:
            lane.cursor.slot = -1
            self._bind_late(lane)


class Pause:
    """A lease in force while the body runs. Leases nest; the newest one counts."""

    def __init__(self, board: Board, names: tuple[str, str], ns: int) -> None:
        self._board = board
        self._names = names
        self._ns = ns
        self._entered = 0

    def __enter__(self) -> None:
        board = self._board
        board._attach()
        self._entered = time.monotonic_ns()
        with board._lock:
            board._pauses.append(self)
            self._write()

    def __exit__(self, *_: object) -> None:
        board = self._board
        with board._lock:
            if self in board._pauses:
                board._pauses.remove(self)
            if board._pauses:
                board._pauses[-1]._write()
            else:
                board._slot.lease("", "", 0, 0)

    def _write(self) -> None:
        self._board._slot.lease(*self._names, self._entered, self._entered + self._ns)


_boards: weakref.WeakSet[Board] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for board in list(_boards):
        try:
            board._after_fork()
        except Exception:
            continue


os.register_at_fork(after_in_child=_after_fork_in_child)
