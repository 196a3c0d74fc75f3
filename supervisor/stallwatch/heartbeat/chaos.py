"""Faults on order inside this process. Imported only where the supervisor set STALLWATCH_CHAOS.

The supervisor sets it in engines of a configuration that says `chaos = true`, to a private folder.
Marks are then wrapped: a lane that enters a working phase looks, at most 50 times a second, for an
order in that folder, and carries it out in its own thread. The file that says that orders are taken
names the lanes that have worked. Without the variable nothing here runs.
"""

from __future__ import annotations

import os
import threading
import time

from stallwatch.heartbeat.lane import Lane
from stallwatch.heartbeat.proc import start_ticks

ENV = "STALLWATCH_CHAOS"
_EVERY_NS = 20_000_000
# Nobody judges the first three; a fault in a wait would be told as that of whom the lane waits for.
_QUIET = frozenset({"idle", "pause", "stop", "wait"})
_WORK = "work"
_MAX_FILES = 1 << 20

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_gate: Gate | None = None


def arm() -> None:
    """Wrap the marks of lanes made from now on, and say that orders are taken. Once, never raises."""
    global _gate
    folder = os.environ.get(ENV, "")
    if _gate is not None or not folder:
        return
    try:
        _gate = Gate(folder)
        for name in ("marker", "pusher"):
            setattr(Lane, name, _making(getattr(Lane, name), _gate))
        for name in ("enter", "push"):
            setattr(Lane, name, _direct(getattr(Lane, name), _gate))
    except Exception:
        return


def _making(make: Callable[..., Any], gate: Gate) -> Callable[..., Any]:
    """A marker factory whose marks look for orders after they have marked."""

    def made(self: Lane, phase: str, *details: str, cls: str = "work", **rest: Any) -> Any:
        mark = make(self, phase, *details, cls=cls, **rest)
        if cls in _QUIET:
            return mark

        def gated(*values: int) -> None:
            mark(*values)
            gate.passed(self, cls)

        return gated

    return made


def _direct(enter: Callable[..., Any], gate: Gate) -> Callable[..., Any]:
    def entered(self: Lane, phase: str, /, cls: str = "work", *rest: Any, **details: Any) -> None:
        enter(self, phase, cls, *rest, **details)
        if cls not in _QUIET:
            gate.passed(self, cls)

    return entered


class Gate:
    """Where lanes pass. One per process; a forked child says anew that it takes orders."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._pid = 0
        self._stem = ""
        self._next_ns: dict[str, int] = {}  # by lane: a busy one takes no other's turn
        self._worked: set[str] = set()
        self._slow: tuple[str, float, float] = ("", 0.0, 0.0)  # lane, delay, until
        self._files: tuple[list[int], float] = ([], 0.0)
        self._register()

    def _register(self) -> None:
        self._pid = os.getpid()
        self._stem = f"{self._folder}/{self._pid}-{start_ticks(self._pid)}"
        self._worked.clear()
        self._say("")

    def _say(self, text: str) -> None:
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        fd = os.open(f"{self._stem}.armed", flags, 0o600)
        os.write(fd, text.encode())
        os.close(fd)

    def passed(self, lane: Lane, cls: str) -> None:
        """A lane has entered a working phase. Whatever fails in here, the engine goes on."""
        try:
            name, delay, until = self._slow
            if name == lane.name and time.monotonic() < until:
                time.sleep(delay)
            now = time.monotonic_ns()
            if now < self._next_ns.get(lane.name, 0):
                return
            self._next_ns[lane.name] = now + _EVERY_NS
            if os.getpid() != self._pid:
                self._register()
            if cls == _WORK and lane.name not in self._worked:
                self._worked.add(lane.name)
                self._say(f"{lane.name}\n")
            self._look(lane)
        except Exception:
            return

    def _look(self, lane: Lane) -> None:
        files, until = self._files
        if files and time.monotonic() > until:
            self._files = ([], 0.0)
            for fd in files:
                os.close(fd)
        path = f"{self._stem}.order"
        if not os.path.exists(path):
            return
        import json  # noqa: PLC0415  (only once something is ordered)

        with open(path, encoding="utf-8") as file:
            order = json.load(file)
        if order["lane"] not in ("", lane.name):
            return
        os.rename(path, f"{self._stem}.taken")  # one thread gets it: the others' rename fails
        self._began()
        self._obey(lane, str(order["fault"]), float(order["seconds"]), float(order["delay_s"]))

    def _began(self) -> None:
        with open(f"{self._stem}.part", "w", encoding="utf-8") as file:
            file.write(str(time.monotonic_ns()))
        os.rename(f"{self._stem}.part", f"{self._stem}.began")

    def _obey(self, lane: Lane, fault: str, seconds: float, delay_s: float) -> None:
        until = time.monotonic() + seconds
        if fault == "slow":
            self._slow = (lane.name, delay_s, until)
        elif fault == "leak-fd":
            self._files = (_leak(), until)
        else:
            _FAULTS[fault](until)


def _hold_gil(until: float) -> None:
    import ctypes  # noqa: PLC0415

    libc = ctypes.PyDLL(None)  # calls keep the GIL
    while (left := until - time.monotonic()) > 0:
        libc.usleep(ctypes.c_uint(int(min(left, 1000.0) * 1e6)))


def _spin(until: float) -> None:
    while time.monotonic() < until:
        pass


def _block(until: float) -> None:
    """Sleep in a semaphore of C, as in a driver's synchronize(). A signal handler may wake it."""
    import ctypes  # noqa: PLC0415

    libc = ctypes.CDLL(None)
    semaphore = ctypes.create_string_buffer(64)
    libc.sem_init(semaphore, 0, 0)
    while (left := until - time.monotonic()) > 0:
        at = time.time() + left
        end = (ctypes.c_long * 2)(int(at), int(at % 1 * 1e9))
        libc.sem_timedwait(semaphore, end)


def _leak() -> list[int]:
    """All descriptors that this process may still have, and two given back for who reports it."""
    files: list[int] = []
    try:
        while len(files) < _MAX_FILES:
            files.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        pass
    for _ in range(min(2, len(files))):
        os.close(files.pop())
    return files


def _fill_pipe(until: float) -> None:
    """Write where nobody reads; at the end somebody does."""
    reader, writer = os.pipe()
    timer = threading.Timer(max(0.0, until - time.monotonic()), os.close, (reader,))
    timer.daemon = True
    timer.start()
    try:
        while True:
            os.write(writer, b"\0" * 4096)
    except OSError:  # its reader is gone
        os.close(writer)


_FAULTS = {"gil": _hold_gil, "spin": _spin, "block": _block, "fill-pipe": _fill_pipe}
