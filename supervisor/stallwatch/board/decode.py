"""From bytes that nobody vouches for to plain values. Pure; bad bytes are a Refused, nothing else."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple, cast

from stallwatch.board.image import LaneImage, PauseLease, PhaseFrame, ProcessImage
from stallwatch.board.words import LIMIT_MAX_NS, UNKNOWN, PhaseWord, Refused, Words, clean
from stallwatch.heartbeat import layout

__all__ = ["Identity", "Key", "Refused", "Unfinished", "identity", "lane", "pending", "process"]

PID_MAX = 1 << 22  # the kernel's own ceiling
HEAD_BYTES = 32  # of a lane: who it is. Written when the slot is claimed and when it is closed

_HEAD = struct.Struct("<QIIQII")  # generation, pid, tid, ticks, owner, flags
_STATE = struct.Struct("<QQQ")  # depth, work, too deep
_FRAME = struct.Struct("<QQQQqq")  # entered, word, progress, limit, details
_FRAME_BYTES = layout.FRAME_WORDS * 8
_FIRST_FRAME = layout.L_FRAMES * 8
_PROCESS = struct.Struct("<QQIiQQIIQQ")


class Unfinished(Exception):
    """A frame of the lane is being written: complete it is not, wrong neither."""


class Key(NamedTuple):
    """Whose slot it is. A reused slot has another generation and inherits nothing."""

    pid: int
    start_ticks: int
    generation: int


class Identity(NamedTuple):
    """What stays the same about a lane while its owner has the slot."""

    slot: int
    pid: int
    tid: int
    start_ticks: int
    role: str
    rank: int
    name: str
    channel: bool
    closed: bool
    words: Words


def lane_key(raw: bytes) -> Key:
    """The key in a lane slot, unchecked."""
    generation, pid, _, ticks, _, _ = _HEAD.unpack_from(raw)
    return Key(pid, ticks, generation)


def lane_owner(raw: bytes) -> int:
    """The process slot that a lane slot names, unchecked."""
    return int.from_bytes(raw[24:28], "little")


def process(slot: int, raw: bytes, *, folder: str, now: int) -> tuple[Key, ProcessImage]:
    """One process slot. Raises Refused."""
    _, generation, pid, rank, ticks, attached, flags, signal, entered, until = _PROCESS.unpack_from(
        raw
    )
    if not 1 < pid <= PID_MAX or not ticks:
        raise Refused(f"process slot {slot}: no such pid ({pid})")
    pause = None
    if until:
        pause = PauseLease(
            name=clean(raw[layout.P_PAUSE_NAME : layout.P_PAUSE_NAME + layout.P_PAUSE_SIZE]),
            owner=clean(raw[layout.P_PAUSE_OWNER : layout.P_PAUSE_OWNER + layout.P_PAUSE_SIZE]),
            entered_ns=min(entered, now),
            until_ns=min(until, now + LIMIT_MAX_NS),
        )
    dump = clean(raw[layout.P_DUMP : layout.P_DUMP + layout.P_DUMP_SIZE])
    # A name, never a path: the reader may be root, and "../../etc/shadow" would end in a report.
    usable = 0 < signal < 65 and bool(dump) and "/" not in dump and not dump.startswith(".")
    return Key(pid, ticks, generation), ProcessImage(
        slot=slot,
        pid=pid,
        start_ticks=ticks,
        role=clean(raw[layout.P_ROLE : layout.P_ROLE + layout.P_ROLE_SIZE]) or UNKNOWN,
        rank=rank,
        ready=bool(flags & layout.FLAG_READY),
        pending=pending(raw),
        attached_ns=min(attached, now),
        detached=bool(flags & layout.FLAG_DETACHED),
        pause=pause,
        dump_signal=signal if usable else 0,
        dump_path=f"{folder}/{layout.DUMPS}/{dump}" if usable else "",
    )


def pending(raw: bytes) -> int:
    """The gauge of a process slot; a negative one counts as 0."""
    value = int.from_bytes(raw[layout.P_PENDING : layout.P_PENDING + 8], "little", signed=True)
    return max(value, 0)


def identity(slot: int, raw: bytes, owner: ProcessImage, words: Words) -> Identity:
    """Who a lane is, given its process. Raises Refused."""
    _, pid, tid, ticks, _, flags = _HEAD.unpack_from(raw)
    if (pid, ticks) != (owner.pid, owner.start_ticks):
        raise Refused(f"process slot {owner.slot} is another process")
    if tid > PID_MAX:
        raise Refused(f"tid {tid}")
    return Identity(
        slot=slot,
        pid=pid,
        tid=tid,
        start_ticks=ticks,
        role=owner.role,
        rank=owner.rank,
        name=clean(raw[layout.L_NAME : layout.L_NAME + layout.L_NAME_SIZE]) or UNKNOWN,
        channel=bool(flags & layout.LANE_CHANNEL),
        closed=bool(flags & layout.LANE_CLOSED),
        words=words,
    )


class _Frame:
    """PhaseFrame before it is frozen.

    The constructor of a frozen dataclass goes through object.__setattr__ for every field: 2.5 us a
    lane, 0.6 % of a core at 256 lanes and 10 Hz, of the 2 % that the whole supervisor may use. The
    slots are the same, so the class can be swapped afterwards.
    """

    __slots__ = ("cls", "entered_ns", "limit_ns", "name", "progress_ns")


class _Image:
    """LaneImage before it is frozen; see _Frame."""

    __slots__ = (
        "beats",
        "channel",
        "closed",
        "details",
        "name",
        "pid",
        "rank",
        "role",
        "slot",
        "stack",
        "start_ticks",
        "text",
        "tid",
        "too_deep",
        "torn",
        "wait_on",
        "work",
    )


def _image(who: Identity, stack: tuple[PhaseFrame, ...]) -> Any:
    image: Any = _Image()
    image.slot = who.slot
    image.pid = who.pid
    image.tid = who.tid
    image.start_ticks = who.start_ticks
    image.role = who.role
    image.rank = who.rank
    image.name = who.name
    image.channel = who.channel
    image.closed = who.closed
    image.stack = stack
    image.torn = False
    return image


def frames(words: Words, raw: bytes) -> list[tuple[PhaseWord, PhaseFrame]]:
    """The phases of a lane slot: their words, and frames without times. Raises Refused, Unfinished."""
    depth = _STATE.unpack_from(raw, HEAD_BYTES)[0]
    if not 1 <= depth <= layout.MAX_DEPTH:
        raise Refused(f"depth {depth}")
    found = []
    for level in range(depth):
        entered, word, _, limit, _, _ = _FRAME.unpack_from(raw, _FIRST_FRAME + level * _FRAME_BYTES)
        if not entered:
            raise Unfinished
        meaning = words.known.get(word) or words.look_up(word)
        found.append((meaning, PhaseFrame(meaning.name, meaning.cls, 0, 0, _limit(meaning, limit))))
    return found


def _limit(meaning: PhaseWord, limit: int) -> int:
    return limit if meaning.has_limit and limit <= LIMIT_MAX_NS else meaning.limit_ns


def lane(
    who: Identity,
    meanings: tuple[PhaseWord, ...],
    raw: bytes,
    *,
    beats: int,
    now: int,
    moving: bool = False,
) -> LaneImage:
    """The image of a lane slot in which `frames` found these words. Never fails.

    Times in the future are clamped to now: such a lane is judged from the moment it was seen.
    moving: its inner clock is known to have been restarted just now.
    """
    _, work, too_deep = _STATE.unpack_from(raw, HEAD_BYTES)
    stack = []
    text = 0
    for level, meaning in enumerate(
        meanings
    ):  # no helpers in here: a call costs as much as a frame
        entered, _, progress, limit, a, b = _FRAME.unpack_from(
            raw, _FIRST_FRAME + level * _FRAME_BYTES
        )
        frame: Any = _Frame()
        frame.name = meaning.name
        frame.cls = meaning.cls
        frame.limit_ns = limit if meaning.has_limit and limit <= LIMIT_MAX_NS else meaning.limit_ns
        if entered > now:  # noqa: PLR1730  (min() and max() cost ten times as much)
            entered = now
        if progress > now or (moving and level == len(meanings) - 1):
            progress = now
        frame.entered_ns = entered
        if progress < entered:  # noqa: PLR1730
            progress = entered
        frame.progress_ns = progress
        frame.__class__ = PhaseFrame
        stack.append(frame)
        text = meaning.text or text
    image = _image(who, tuple(stack))
    image.beats = beats
    image.work = work
    image.wait_on = meaning.wait_on
    names = meaning.names
    image.details = tuple(zip(names, (a, b))) if names else ()  # noqa: B905  (strict costs 0.2 us)
    image.text = clean(raw[layout.L_TEXT : layout.L_TEXT + text]) if text else ""
    image.too_deep = too_deep
    image.__class__ = LaneImage
    return cast("LaneImage", image)
