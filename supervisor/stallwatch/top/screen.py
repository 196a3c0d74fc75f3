"""The thin shell: a terminal in its alternate screen, keys in, drawings out.

One `select` waits for a key, a look at the daemon, a signal, or the second to be over.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType

from rich.console import Console
from rich.live import Live

from stallwatch.cli.output import ReaderGone
from stallwatch.top.draw import Scene, draw
from stallwatch.top.feed import Feed, ring
from stallwatch.top.keys import decode
from stallwatch.top.view import Mode, Quit, Restart, View, press, settle

_REDRAW_S = 1.0
_ESC_S = 0.05  # a lone ESC is a key once nothing has followed it for so long
_CHUNK = 1024
# SIGINT too: a shell that starts us in the background has us ignore it, and Ctrl-C would do nothing.
_ENDS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class Screen:
    """One run of the view. `run` returns the exit code."""

    def __init__(self, feed: Feed, view: View, *, where: str, color: bool) -> None:
        self._feed, self._view, self._where = feed, view, where
        if isinstance(sys.stdout, io.TextIOWrapper):  # a character that the terminal lacks is a ?
            sys.stdout.reconfigure(errors="replace")
        self._console = Console(
            force_terminal=True,
            no_color=not color,
            markup=False,
            emoji=False,
            highlight=False,
            soft_wrap=False,
        )
        self._begun = b""  # bytes of a key that is not whole yet
        self._signal = 0

    def run(self) -> int:
        wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._feed.told = ring(woken)
        try:
            with self._signals(woken), _raw(sys.stdin.fileno()), self._live() as live:
                self._feed.start()
                self._loop(wake, live)
        except OSError:  # nothing but the terminal is read or written here, and it has gone
            raise ReaderGone from None
        finally:
            self._feed.end()
            os.close(woken)
            os.close(wake)
        return 128 + self._signal if self._signal else 0

    def _live(self) -> Live:
        # One write a drawing, over what stands there: the screen is never empty in between.
        return Live(
            console=self._console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def _loop(self, wake: int, live: Live) -> None:
        keyboard = sys.stdin.fileno()
        while not self._signal:
            self._draw(live)
            wait = _ESC_S if self._begun else _REDRAW_S
            ready, _, _ = select.select([keyboard, wake], [], [], wait)
            if wake in ready:
                _drain(wake)
            if keyboard in ready:
                data = _read(keyboard)
                if not data:  # the terminal has gone
                    return
                if self._keys(self._begun + data, final=False):
                    return
            elif self._begun and not ready and self._keys(self._begun, final=True):
                return

    def _keys(self, data: bytes, *, final: bool) -> bool:
        """Presses each key; True to leave."""
        keys, self._begun = decode(data, final=final)
        for key in keys:
            self._view, order = press(self._view, key, self._feed.news().picture)
            if isinstance(order, Quit):
                return True
            if isinstance(order, Restart):
                self._feed.restart(order.engine)
            if self._view.mode is Mode.CONFIRM:
                # A question is answered by who has seen it, not by the rest of pasted words.
                termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)
                self._begun = b""
                break
        return False

    def _draw(self, live: Live) -> None:
        news = self._feed.news()
        self._view = settle(self._view, news.picture)
        self._feed.want(self._view.engine)
        if said := self._feed.answer():
            self._view = replace(self._view, message=said)
        stale = time.monotonic() - news.taken
        scene = Scene(self._view, news.picture, self._where, stale, news.trouble)
        width, height = size(sys.stdout.fileno())
        self._console.size = (width, height)
        live.update(draw(scene, width, height), refresh=True)

    @contextlib.contextmanager
    def _signals(self, woken: int) -> Iterator[None]:
        """SIGWINCH only wakes the loop; what ends us ends the loop, and so mends the terminal."""

        def note(number: int, _: FrameType | None) -> None:
            if number in _ENDS:
                self._signal = number

        before = {each: signal.signal(each, note) for each in (*_ENDS, signal.SIGWINCH)}
        bell = signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(bell)
            for each, handler in before.items():
                signal.signal(each, handler)


def size(fd: int) -> tuple[int, int]:
    """Columns and rows; 80 x 24 for a terminal that does not say."""
    try:
        columns, rows = os.get_terminal_size(fd)
    except OSError:
        columns = rows = 0
    return columns or 80, rows or 24


@contextlib.contextmanager
def _raw(fd: int) -> Iterator[None]:
    """Keys at once and without echo. Ctrl-C still interrupts; Ctrl-Z would leave the screen so."""
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        now = termios.tcgetattr(fd)
        now[6][termios.VSUSP] = b"\0"
        termios.tcsetattr(fd, termios.TCSANOW, now)
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal may be gone
            termios.tcsetattr(fd, termios.TCSANOW, before)


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, _CHUNK)
    except OSError:
        return b""


def _drain(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while os.read(fd, _CHUNK):
            pass
