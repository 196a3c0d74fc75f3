from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from process_helpers import Owned, subreaper
from stallwatch import procfs
from stallwatch.errors import EngineStartError
from stallwatch.process.command import expand, uses
from stallwatch.process.reaper import Reaper
from stallwatch.process.spawn import SpawnSpec, spawn
from stallwatch.testing import tree as trees
from stallwatch.testing.tree import tree, wait_until

pytestmark = pytest.mark.process
ENV = dict(os.environ)


@pytest.fixture
def reaper():
    with subreaper() as it:
        yield it


class LateClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0

    def monotonic_ns(self) -> int:
        return self.now

    def wall(self) -> float:
        return 0.0


def test_a_child_starts_clean(reaper, tmp_path):
    """Own session, the given folder, empty mask, default handlers, nothing inherited, stdin empty."""
    program = trees._HEAD + (
        "status = dict(line.split(':', 1) for line in open('/proc/self/status'))\n"
        "fds = sorted(int(n) for n in os.listdir('/proc/self/fd'))[:-1]\n"
        "print(os.getsid(0) == os.getpid(), os.getcwd(), status['SigBlk'].strip(),"
        " signal.getsignal(signal.SIGINT) is signal.default_int_handler,"
        " signal.getsignal(signal.SIGHUP) is signal.SIG_DFL, fds, os.read(0, 1), os.getppid());"
        "say(); rest()"
    )
    leak = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(leak, True)
    before = (
        signal.signal(signal.SIGHUP, signal.SIG_IGN),
        signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        child = spawn(SpawnSpec(trees.argv(program), ENV, cwd=str(tmp_path)), hold=reaper.hold())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGHUP, before[0])
        signal.signal(signal.SIGINT, before[1])
        os.close(leak)
    try:
        line = trees.read_line(child.output)

        assert line == (f"True {tmp_path} 0000000000000000 True True [0, 1, 2] b'' {os.getpid()}")
        assert procfs.start_ticks(child.pid) == child.start_ticks
        assert os.getcwd() != str(tmp_path)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        wait_until(lambda: reaper.collect(child.pid, child.start_ticks, child.pidfd))
        os.close(child.pidfd)
        os.close(child.output)


@pytest.mark.parametrize(
    ("command", "says", "hints"),
    [
        ((), "empty", "command"),
        (("",), "empty", "command"),
        (("no-such-program",), "command not found: no-such-program", "PATH"),
        (("python -m x",), "command not found", "separate items"),
        (("./no/such",), "command not found: ./no/such", "path"),
        (("/tmp",), "folder", "file in it"),
        (("{tmp}/plain",), "not executable", "chmod"),
        (("{tmp}/nothing",), "neither a program nor a script", "#!"),
        (("{tmp}/orphan",), "interpreter does not exist", "#! line"),
        (("/bin/true", "a\0b"), "NUL", ""),
    ],
)
def test_a_command_that_cannot_start_says_why(tmp_path, command, says, hints):
    """Every way of being no command gives one sentence and the nearest remedy; no process, no fd."""
    for name, text, mode in (
        ("plain", "x", 0o600),
        ("nothing", "\x00\x01", 0o700),
        ("orphan", "#!/no/such/interpreter\n", 0o700),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    command = tuple(item.replace("{tmp}", str(tmp_path)) for item in command)
    before = len(os.listdir("/proc/self/fd"))

    with pytest.raises(EngineStartError) as error:
        spawn(SpawnSpec(command, ENV))

    assert says in error.value.message
    assert hints in error.value.hint
    assert error.value.exit_code == 3
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_missing_folder_is_named(tmp_path):
    """A cwd that does not exist is told as that, not as a missing command."""
    with pytest.raises(EngineStartError, match="working folder"):
        spawn(SpawnSpec(("/bin/true",), ENV, cwd=str(tmp_path / "no")))


def test_a_program_beside_this_python_is_hinted_at(tmp_path):
    """`vllm` not on PATH but in this environment: the hint gives its full path."""
    with pytest.raises(EngineStartError) as error:
        spawn(SpawnSpec((os.path.basename(sys.executable),), {"PATH": str(tmp_path)}))

    assert sys.executable in error.value.hint


def test_an_engine_that_dies_at_once_keeps_its_status(reaper):
    """Between spawn and the first look the root may die: its status is not lost to the reaper."""
    for _ in range(10):
        with tree("import os; os._exit(4)", reaper=reaper) as t:
            for _ in range(3):
                reaper.poll()
            t.settle(set())
            [end] = t.members.exits()
            assert (end.status, end.root) == (4, True)


def test_exactly_four_fields_are_replaced():
    """Other braces pass untouched, JSON above all."""
    command = (
        "vllm", "--port", "{port}", "--compilation-config", '{"level": 3}',
        "{name}-{incarnation}", "{run_dir}/x", "{}", "{other}", "{{port}}", "${port}",
    )  # fmt: skip
    values = {"port": 8001, "name": "chat", "incarnation": 2, "run_dir": "/tmp/sw-1"}

    assert expand(command, values) == (
        "vllm", "--port", "8001", "--compilation-config", '{"level": 3}',
        "chat-2", "/tmp/sw-1/x", "{}", "{other}", "{8001}", "$8001",
    )  # fmt: skip
    assert uses(command, "port")


def test_a_field_without_a_value_is_a_mistake():
    """{port} in the command of an engine without a port is told before anything starts."""
    with pytest.raises(EngineStartError, match="has no port"):
        expand(("x", "{port}"), {"port": None})


def test_a_zombie_that_a_popen_owns_hides_nobody(reaper):
    """An orphan behind an owned zombie is reaped, and the Popen still gets its own status."""
    owned, clock = Owned(), LateClock()
    mine = Reaper(owned, clock=clock)
    tool = subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(3)"])
    owned.set.add(tool.pid)
    wait_until(lambda: procfs.stat(tool.pid).state == "Z")
    with tree(trees.ROOT_DIES, reaper=reaper, adopt_orphans=False) as t:
        _, orphan = t.pids()
        os.kill(orphan, signal.SIGKILL)
        wait_until(lambda: (s := procfs.stat(orphan)) is None or s.state == "Z")
        for _ in range(6):
            clock.now += 600_000_000
            mine.poll()

        assert procfs.stat(orphan) is None
        assert procfs.stat(tool.pid).state == "Z"
        assert tool.wait() == 3
        t.settle(set())


def test_the_reaper_is_in_no_hurry_with_strangers(reaper):
    """A zombie that nobody claimed yet is left half a second: its Popen may not be listed yet."""
    clock = LateClock()
    mine = Reaper(clock=clock)
    tool = subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(3)"])
    wait_until(lambda: procfs.stat(tool.pid).state == "Z")

    assert mine.poll() == 0
    assert tool.wait() == 3


def test_reaping_never_blocks(reaper):
    """With a living child and no zombie, poll() returns at once."""
    with tree(trees.SLEEPER, reaper=reaper) as t:
        t.pids()
        began = time.monotonic()
        assert Reaper().poll() == 0
        assert time.monotonic() - began < 0.5
