"""Giving a fault to a process: signals through a pidfd, everything else as an order it takes itself."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stallwatch.chaos.faults import FAULTS
from stallwatch.chaos.target import Aim
from stallwatch.errors import StallwatchError
from stallwatch.process import pidfd

_MAX_NAMES = 65536  # bytes of lane names that are read
TAKE_S = 5.0  # how long an order waits for the lane's next mark
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Order:
    """What is to happen. seconds: when the fault ends by itself."""

    fault: str
    seconds: float
    seed: int
    delay_s: float = 1.0  # of `slow`, at every mark


def inject(order: Order, aim: Aim, folder: Path | None) -> int:
    """Do it; returns the monotonic time in ns at which the fault began.

    Raises StallwatchError when it cannot be done, and then nothing of it is left behind.
    """
    if FAULTS[order.fault].inside:
        return _ask(order, aim, folder)
    number = signal.SIGSTOP if order.fault == "stop" else signal.SIGKILL
    fd = pidfd.open_exact(aim.pid, aim.start_ticks)
    if fd is None:
        raise StallwatchError(f"{aim.process} has ended: there is nothing to {order.fault}")
    began = time.monotonic_ns()
    if not pidfd.send(fd, number):
        os.close(fd)
        raise StallwatchError(f"{aim.process} (pid {aim.pid}) may not be signalled by this daemon")
    if order.fault == "stop":
        threading.Thread(target=_continue, args=(fd, order.seconds), daemon=True).start()
    else:
        os.close(fd)
    return began


def working(folder: Path | None, stem: str) -> frozenset[str]:
    """The lanes of a process that have entered a working phase, as it says itself; {} if it does not."""
    said = _read(folder / f"{stem}.armed", _MAX_NAMES) if folder is not None else b""
    return frozenset(said.decode("utf-8", "replace").splitlines())


def _continue(fd: int, seconds: float) -> None:
    threading.Event().wait(seconds)
    pidfd.send(fd, signal.SIGCONT)
    os.close(fd)


def _ask(order: Order, aim: Aim, folder: Path | None) -> int:
    stem = f"{aim.pid}-{aim.start_ticks}"
    if folder is None or not (folder / f"{stem}.armed").exists():
        raise StallwatchError(
            f"{aim.process} cannot do {order.fault} to itself: it has not loaded this version's "
            "heartbeat library, or it was started before chaos was enabled",
            hint="only stop and kill can be injected into it; restart the engine for the others",
        )
    path, part = folder / f"{stem}.order", folder / f"{stem}.part"
    said: dict[str, Any] = {
        "fault": order.fault,
        "lane": aim.lane,
        "seconds": order.seconds,
        "delay_s": order.delay_s,
        "seed": order.seed,
    }
    try:
        (folder / f"{stem}.began").unlink(missing_ok=True)
        _write(part, json.dumps(said).encode())
        part.rename(path)
    except OSError as error:
        raise StallwatchError(f"the order cannot be written: {error.strerror}") from error
    return _taken(folder, stem, aim)


def _taken(folder: Path, stem: str, aim: Aim) -> int:
    """When the process says that its fault began; the order is taken back if it does not come."""
    asked_ns = time.monotonic_ns()
    until = time.monotonic() + TAKE_S
    while time.monotonic() < until:
        began = _said(folder / f"{stem}.began")
        if began is not None:  # the engine's own word: not before it was asked, not in the future
            return min(max(began, asked_ns), time.monotonic_ns())
        threading.Event().wait(_POLL_S)
    try:
        (folder / f"{stem}.order").unlink()
    except OSError:  # taken at the last moment, and what it said was not read in time
        return time.monotonic_ns()
    raise StallwatchError(
        f"{aim.address} entered no working phase within {TAKE_S:g} s: a fault would not be seen",
        hint="give the engine work, then inject again",
    )


# The folder is the engine's too: whatever it puts there, nothing of ours follows a link or waits.


def _write(path: Path, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def _said(path: Path) -> int | None:
    """The number in a file of the engine's, None while there is none."""
    try:
        return int(_read(path, 20))
    except ValueError:
        return None


def _read(path: Path, size: int) -> bytes:
    """The beginning of a file of the engine's; nothing when it cannot be read at once."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, size)
    except OSError:
        return b""
    finally:
        os.close(fd)
