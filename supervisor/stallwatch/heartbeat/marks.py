"""The hot path: bound marks. Each is a closure over one cursor and one frame word.

WHY the stores look the way they do. A frame must never be left half-written by a stall. CPython
3.11-3.13 gives up the GIL, runs signal handlers and collects garbage only where it tests its eval
breaker: at RESUME (a Python call), at JUMP_BACKWARD (a loop) and after CALL (any call). A memoryview
item store is STORE_SUBSCR into C code that calls nothing back when index and value are exact ints.
So between `top[0] = 0` (being written) and `top[0] = now` (whole again) stand such stores only:
straight-line, exact ints, no call, no loop, nothing that allocates a container. What is left is the
kernel stopping the thread at that very place, and a tracing debugger; the reader calls that `torn`
and uses the last good copy. tests/unit/test_heartbeat_bytecode.py holds every function here to it.

WHY the time of entry is the sequence: an item store costs 17 ns and counting costs 25, so a separate
odd/even sequence made a mark 245 ns where this one is 205. A frame is whole when its entry time is not
0, and no two updates have the same time. Depth and work are single words and always whole.

Literal indexes (lane: 4 depth, 5 work; frame: 0 entered, 1 word, 2 progress, 3 limit, 4 and 5 details)
because a global costs a lookup; the bytecode test compares them with layout.py.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import index

from stallwatch.heartbeat.cursor import Cursor
from stallwatch.heartbeat.layout import INT64_MAX, INT64_MIN, MAX_DEPTH

Mark = Callable[..., None]


def plain(value: object) -> int:
    """Any integer-like value as an exact int that fits 64 bits; 0 when it is none.

    Runs before an update, never inside one: `__index__` of a device tensor waits for the device.
    """
    try:
        return min(max(index(value), INT64_MIN), INT64_MAX)  # type: ignore[arg-type]
    except Exception:
        return 0


def marker(c: Cursor, word: int) -> Mark:
    """A mark without details: replaces the innermost phase and restarts its clock."""

    def mark() -> None:
        clock = c.clock
        now = clock()
        top = c.top
        top[0] = 0
        top[1] = word
        top[0] = now

    return mark


def detail_marker(c: Cursor, word: int) -> Mark:
    """A mark with one or two integer details."""

    def mark(a: int = 0, b: int = 0) -> None:
        if a.__class__ is not int or b.__class__ is not int:
            mark(plain(a), plain(b))
            return
        clock = c.clock
        now = clock()
        top = c.top
        try:
            top[0] = 0
            top[4] = a
            top[5] = b
            top[1] = word
            top[0] = now
        except ValueError:  # beyond 64 bits: raised in C, before anything else could run
            top[0] = now
            mark(plain(a), plain(b))

    return mark


def pusher(c: Cursor, word: int) -> Mark:
    """Enter an inner phase; the outer one keeps its clock. Undone by the cursor's pop."""

    def push() -> None:
        clock = c.clock
        now = clock()
        depth = c.depth + 1
        if depth > MAX_DEPTH:
            c.sink(depth)
            return
        c.depth = depth
        m = c.m
        top = c.top = c.frames[depth]
        top[0] = 0
        top[1] = word
        top[0] = now
        m[4] = depth

    return push


def detail_pusher(c: Cursor, word: int) -> Mark:
    """The same with one or two integer details."""

    def push(a: int = 0, b: int = 0) -> None:
        if a.__class__ is not int or b.__class__ is not int:
            push(plain(a), plain(b))
            return
        clock = c.clock
        now = clock()
        depth = c.depth + 1
        if depth > MAX_DEPTH:
            c.sink(depth)
            return
        m = c.m
        top = c.frames[depth]
        try:
            top[0] = 0
            top[4] = a
            top[5] = b
            top[1] = word
            top[0] = now
        except ValueError:
            push(plain(a), plain(b))
            return
        c.depth = depth
        c.top = top
        m[4] = depth

    return push


def popper(c: Cursor) -> Callable[[], None]:
    """Leave the innermost phase; the outer one is current again and its clock never stopped."""

    def pop() -> None:
        depth = c.depth - 1
        if depth < 1:
            return
        c.depth = depth
        if depth > MAX_DEPTH:
            return
        c.top = c.frames[depth]
        m = c.m
        m[4] = depth

    return pop


def progressor(c: Cursor) -> Callable[..., None]:
    """Count work done, and restart the clock of the innermost phase only."""

    def progress(n: int = 1) -> None:
        if n.__class__ is not int:
            progress(plain(n))
            return
        clock = c.clock
        now = clock()
        work = c.work + n
        m = c.m
        top = c.top
        try:
            m[5] = work
            top[2] = now
        except ValueError:
            return
        c.work = work

    return progress


def enterer(c: Cursor) -> Callable[..., None]:
    """Replace phase, limit and details at once: the end of the convenient forms."""

    def enter(word: int, limit_ns: int, a: int, b: int) -> None:
        clock = c.clock
        now = clock()
        top = c.top
        top[0] = 0
        top[1] = word
        top[3] = limit_ns
        top[4] = a
        top[5] = b
        top[0] = now

    return enter


def deepener(c: Cursor) -> Callable[..., None]:
    """The same one level deeper."""

    def deepen(word: int, limit_ns: int, a: int, b: int) -> None:
        clock = c.clock
        now = clock()
        depth = c.depth + 1
        if depth > MAX_DEPTH:
            c.sink(depth)
            return
        c.depth = depth
        m = c.m
        top = c.top = c.frames[depth]
        top[0] = 0
        top[1] = word
        top[3] = limit_ns
        top[4] = a
        top[5] = b
        top[0] = now
        m[4] = depth

    return deepen


def text_enterer(c: Cursor) -> Callable[..., None]:
    """The same with text. One text per lane: the newest phase that has one owns it."""

    def enter(bits: tuple[int, int, int, int], text: bytes) -> None:
        clock = c.clock
        now = clock()
        word, limit_ns, a, b = bits
        top = c.top
        memory = c.text
        where = slice(len(text))
        top[0] = 0
        memory[where] = text
        top[1] = word
        top[3] = limit_ns
        top[4] = a
        top[5] = b
        top[0] = now

    return enter
