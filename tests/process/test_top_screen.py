"""`stallwatch top` in a pseudo-terminal, beside a real daemon."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from control_helpers import serving
from daemon_helpers import STALLWATCH, Daemon, daemon, place, until
from stallwatch.control.service import EngineView, LaneView
from stallwatch.testing.service import FakeService, stall_report

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(120)]

HOME = b"\x1b[H"
SGR = re.compile(rb"\x1b\[[\d;]*m")
# all that the view may tell a terminal: colours, home, alternate screen, cursor
ALLOWED = re.compile(rb"\x1b\[([\d;]*m|H|\?1049[hl]|\?25[hl])")
KEYS = "q quit"


class Terminal:
    """A pseudo-terminal with `stallwatch top` as its foreground process."""

    def __init__(self, socket: str, *flags: str, rows: int = 30) -> None:
        self.master, slave = os.openpty()
        self.out = b""
        self.rows = rows
        self.size(100, rows)
        self.before = termios.tcgetattr(slave)
        self.slave = slave  # held, so that its settings can be read when the view has ended
        env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "STALLWATCH_URL")}
        env |= {"TERM": "xterm-256color", "COLUMNS": "7", "LINES": "3"}
        self.process = subprocess.Popen(
            ["setsid", "--ctty", STALLWATCH, "top", "--socket", socket, "--every", "100ms", *flags],
            stdin=slave, stdout=slave, stderr=slave, env=env,
        )  # fmt: skip

    def size(self, columns: int, rows: int) -> None:
        """The kernel tells the foreground process by SIGWINCH."""
        self.rows = rows
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def read(self) -> None:
        """What has come, and at most 50 ms of waiting for it."""
        if select.select([self.master], [], [], 0.05)[0]:
            with contextlib.suppress(OSError):
                self.out += os.read(self.master, 65536)

    def frame(self) -> list[str]:
        """Lines of the last drawing that has come whole."""
        for drawn in reversed(self.out.split(HOME)[-2:]):
            text = re.sub(rb"\x1b\[\?\d+[hl]", b"", SGR.sub(b"", drawn)).decode()
            lines = text.split("\r\n")
            if len(lines) == self.rows and lines[-1].strip():
                return lines
        return []

    def wait(self, sign: Callable[[list[str]], object], what: str) -> list[str]:
        """The first whole drawing with the sign."""

        def seen() -> list[str]:
            self.read()
            lines = self.frame()
            return lines if lines and sign(lines) else []

        try:
            return list(until(seen, what=what))
        except AssertionError as error:
            shown = "\n".join(self.frame()) or repr(self.out[-3000:])
            raise AssertionError(f"{error}; the screen:\n{shown}") from None

    def wait_words(self, words: str) -> list[str]:
        return self.wait(lambda lines: words in "\n".join(lines), f"{words!r} on the screen")

    def wait_exit(self) -> int:
        def ended() -> bool:
            self.read()  # a full terminal would hold it up
            return self.process.poll() is not None

        until(ended, what="top ends")
        self.read()
        return int(self.process.returncode)

    def mended(self) -> bool:
        """The terminal is as it was: settings, main screen, cursor."""
        same = termios.tcgetattr(self.slave) == self.before
        shown = self.out.rfind(b"\x1b[?25h") > self.out.rfind(b"\x1b[?25l")
        return same and shown and self.out.rfind(b"\x1b[?1049l") > self.out.rfind(b"\x1b[?1049h")

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        for fd in (self.master, self.slave):
            with contextlib.suppress(OSError):
                os.close(fd)


@contextlib.contextmanager
def terminal(served: Daemon | str, *flags: str, rows: int = 30) -> Iterator[Terminal]:
    socket = served if isinstance(served, str) else str(served.state / "control.sock")
    found = Terminal(socket, *flags, rows=rows)
    try:
        yield found
    finally:
        found.end()


@pytest.fixture(name="served", scope="module")
def _served() -> Iterator[Daemon]:
    with place() as folder, daemon(folder) as found:
        found.wait_ready()
        yield found


def test_engines_and_lanes_are_seen_live_and_the_terminal_is_mended(served: Daemon) -> None:
    """State, lanes and phases are drawn and drawn again; q leaves a terminal as it was."""
    with terminal(served) as screen:
        first = screen.wait_words("worker:0/model")
        drawn = screen.out.count(HOME)
        screen.wait(lambda _: screen.out.count(HOME) > drawn + 5, "it is drawn again")
        screen.type("q")

        assert screen.wait_exit() == 0
        assert any(served.name in line and "ready" in line for line in first)
        assert screen.mended()
        assert b"\x1b" not in ALLOWED.sub(b"", screen.out)


def test_a_frame_never_begins_with_an_empty_screen(served: Daemon) -> None:
    """Drawings overwrite each other: after the first, nothing erases the screen or a line."""
    with terminal(served) as screen:
        screen.wait_words("worker:0/model")
        screen.wait(lambda _: screen.out.count(HOME) > 6, "some drawings")

        assert not re.search(rb"\x1b\[\d*[JK]", screen.out)
        assert screen.out.count(b"\x1b[?1049h") == 1


def test_lanes_are_filtered_and_the_engine_described(served: Daemon) -> None:
    """/ leaves the lanes that match, Esc all of them, d shows processes, ? the keys."""
    with terminal(served) as screen:
        screen.wait_words("worker:0/model")
        screen.type("/api\r")
        filtered = screen.wait_words("1 of 2, filter 'api'")
        screen.type("\x1b")
        screen.wait_words("2 of 2")
        screen.type("d")
        described = screen.wait_words("Command:")
        screen.type("?")
        screen.wait_words("select an engine")

        assert not any("worker:0/model" in line for line in filtered)
        assert any("worker:0: pid" in line for line in described)


def test_a_smaller_and_a_larger_terminal_are_filled(served: Daemon) -> None:
    """After a resize the drawing has the new size; the variables COLUMNS and LINES do not count."""
    with terminal(served) as screen:
        screen.wait(lambda lines: len(lines) == 30, "30 lines")
        screen.size(50, 10)
        small = screen.wait(lambda lines: max(map(len, lines)) <= 50, "at most 50 columns")
        screen.size(140, 50)
        large = screen.wait(lambda lines: max(map(len, lines)) > 100, "more than 100 columns")

        assert len(small) == 10
        assert len(large) == 50
        assert KEYS in large[-1]


def test_read_only_restarts_nothing(served: Daemon) -> None:
    """With --readonly r and y do nothing and say so."""
    before = served.engine()["incarnation"]
    with terminal(served, "--readonly") as screen:
        screen.wait_words("worker:0/model")
        screen.type("r")
        screen.wait_words("read-only: nothing is restarted")
        screen.type("y?")
        screen.wait_words("select an engine")  # y has been taken: ? came after it
        drawn = screen.out.count(HOME)
        screen.wait(lambda _: screen.out.count(HOME) > drawn + 5, "time for an order")

    assert served.engine()["incarnation"] == before
    assert not served.said("restart asked for")


def test_pasted_words_answer_no_question(served: Daemon) -> None:
    """An r and a y that come together restart nothing: the question has to be seen first."""
    with terminal(served) as screen:
        screen.wait_words("worker:0/model")
        screen.type("very")
        screen.wait_words(f"Restart {served.name}? y/n")
        screen.type("n")
        screen.wait_words("nothing was restarted")

    assert not served.said("restart asked for")


@pytest.mark.parametrize(("how", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_mends_the_terminal(served: Daemon, how: signal.Signals, code: int) -> None:
    """Ended by a signal the view leaves the alternate screen, and its exit code says by which."""
    with terminal(served) as screen:
        screen.wait_words("worker:0/model")
        if how is signal.SIGINT:
            screen.type("\x03")  # as a person does it
        else:
            screen.process.send_signal(how)

        assert screen.wait_exit() == code
        assert screen.mended()


def test_the_view_ends_with_its_terminal(served: Daemon) -> None:
    """When the terminal is closed, nothing of the view goes on."""
    with terminal(served) as screen:
        screen.wait_words("worker:0/model")
        os.close(screen.slave)
        os.close(screen.master)

        until(lambda: screen.process.poll() is not None, what="top ends")


@pytest.mark.parametrize("which", ["stdin", "stdout"])
def test_without_a_terminal_it_says_so(served: Daemon, which: str) -> None:
    """With no terminal on either side: one sentence on stderr, exit code 2, nothing on stdout."""
    master, slave = os.openpty()
    try:
        sides = {"stdin": slave, "stdout": slave, which: subprocess.PIPE}
        process = subprocess.Popen(
            [STALLWATCH, "top", "--socket", str(served.state / "control.sock")],
            **sides, stderr=subprocess.PIPE, text=True, env={**served.env, "TERM": "xterm"},
        )  # fmt: skip
        out, said = process.communicate(timeout=20)
    finally:
        os.close(master)
        os.close(slave)

    assert process.returncode == 2
    assert said == "stallwatch: top needs a terminal: `stallwatch status` prints the same once.\n"
    assert not out


def test_without_a_daemon_it_says_so(served: Daemon, tmp_path: Path) -> None:
    """No daemon at the start: exit code 5, and no screen is opened."""
    with terminal(served, "--socket", str(tmp_path / "none.sock")) as screen:
        assert screen.wait_exit() == 5
        assert b"no daemon at" in screen.out
        assert b"\x1b" not in screen.out


def test_an_engine_is_restarted_after_a_y() -> None:
    """r and n restart nothing, r and y the selected engine: its next incarnation is seen."""
    with place() as folder, daemon(folder) as served:
        served.wait_ready()
        with terminal(served) as screen:
            screen.wait_words("worker:0/model")
            screen.type("r")
            screen.wait_words(f"Restart {served.name}? y/n")
            screen.type("n")
            screen.wait_words("nothing was restarted")

            assert served.engine()["incarnation"] == 1
            screen.type("r")
            screen.wait_words(f"Restart {served.name}? y/n")
            screen.type("y")
            served.wait_ready(2)
            screen.wait(
                lambda lines: any(
                    re.search(rf"> {served.name} +ready +2 ", line) for line in lines
                ),
                "the second incarnation",
            )

            assert served.said("restart asked for")


def test_a_daemon_that_goes_and_comes_back_is_seen_again() -> None:
    """While no daemon answers the view says so and keys work; when one does, it is live again."""
    with place() as folder, daemon(folder) as served:
        served.wait_ready()
        with terminal(served) as screen:
            screen.wait_words("worker:0/model")
            served.stop()
            screen.wait(lambda lines: "no daemon" in lines[0], "that there is none")
            screen.type("?")
            screen.wait_words("select an engine")
            screen.type("?")
            served.start()
            served.wait_ready()
            screen.wait(
                lambda lines: lines[0].startswith("stallwatch ") and "worker:0/model" in str(lines),
                "the new daemon's lanes",
            )


def test_a_stall_is_seen_with_its_kind() -> None:
    """A worker that stands still is coloured over half of its limit, then listed as a stall."""
    engine = {"enforce": "observe", "limits": {"default": "3s", "compile": "3s", "start": "30s"}}
    with place() as folder, daemon(folder, engine) as served:
        served.wait_ready()
        with terminal(served) as screen:
            screen.wait_words("worker:0/model")
            served.order("worker", "stall")
            screen.wait(lambda _: re.search(rb"\x1b\[33m *\d+%", screen.out), "a lane over half")
            stall = served.wait_stall()
            screen.wait_words(stall["id"].rpartition("-")[2])
            served.release()


def test_a_stopped_daemon_does_not_hold_up_the_keys(served: Daemon) -> None:
    """While the daemon answers nothing at all, keys are obeyed at once and the age is shown."""
    with terminal(served) as screen:
        screen.wait_words("worker:0/model")
        served.process.send_signal(signal.SIGSTOP)
        try:
            screen.wait(lambda lines: "old: no answer yet" in lines[0], "the age")
            begun = time.monotonic()
            screen.type("q")
            code = screen.wait_exit()
            took = time.monotonic() - begun
        finally:
            served.process.send_signal(signal.SIGCONT)

    assert code == 0
    assert took < 5.0  # its question to the daemon has 10 s


class Busy(FakeService):
    """64 processes of 4 lanes that are elsewhere at every look, and 1,000 stalls."""

    looks = 0

    def engine(self, name: str) -> EngineView:
        self.looks += 1
        lanes = tuple(
            LaneView(f"worker:{p}/lane-{n}", "work", f"step_{self.looks % 10}",
                     (self.looks * 7 + p) % 50, 60.0, self.looks, self.looks, 100 + p, 100 + p)
            for p in range(64) for n in range(4)
        )  # fmt: skip
        return replace(super().engine(name), lanes=lanes)


def test_keys_are_obeyed_while_much_is_going_on(tmp_path: Path) -> None:
    """64 x 4 lanes that all change ten times a second and 1,000 stalls: each key is seen at once."""
    service = Busy()
    service.reports = {f"st-1-{n:08x}": stall_report(f"st-1-{n:08x}") for n in range(1000)}
    with serving(tmp_path, service) as running, terminal(running.path, rows=60) as screen:
        screen.wait_words("256 of 256")
        used = psutil.Process(screen.process.pid).cpu_times()
        drawn, looks, took = screen.out.count(HOME), service.looks, []
        for keys, sign in (("?", "select an engine"), ("?", "256 of 256")) * 5:
            begun = time.monotonic()
            screen.type(keys)
            screen.wait_words(sign)
            took.append(time.monotonic() - begun)
        screen.wait(lambda _: service.looks > looks + 20, "twenty looks")
        now = psutil.Process(screen.process.pid).cpu_times()
        drawn = screen.out.count(HOME) - drawn
        screen.type("q")

        assert screen.wait_exit() == 0
        assert sorted(took)[len(took) // 2] < 1.0
        # CPU time, which other load does not change: far from filling a core at ten looks a second
        assert (now.user + now.system - used.user - used.system) / drawn < 0.1
