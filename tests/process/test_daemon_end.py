"""However a daemon is ended, and in whatever it is doing: exit status 0, and nothing is left."""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from daemon_helpers import ENGINES, Daemon, daemon, mentioning, place, until

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.fixture
def folder() -> Iterator[Path]:
    with place() as path:
        yield path


def to_backoff(run: Daemon) -> None:
    run.wait_ready()
    run.order("worker", "exit1")
    run.wait_state("backoff")


def to_exhausted(run: Daemon) -> None:
    run.wait_ready()
    run.order("worker", "exit1")
    run.wait_ready(2)
    run.order("worker", "exit1")
    run.wait_state("exhausted")


def to_stalled(run: Daemon) -> None:
    run.wait_ready()
    run.order("worker", "stall")
    run.wait_state("stalled", "failed")


@pytest.mark.parametrize(
    ("there", "restart"),
    [
        (to_backoff, {"backoff": ["1h"]}),
        (to_exhausted, {"budget": 1, "backoff": ["10ms"]}),
        (to_stalled, {"budget": 5, "backoff": ["10ms"]}),
    ],
    ids=["backoff", "exhausted", "stalled"],
)
def test_sigterm_ends_the_daemon_in_every_state(folder, there: Callable[[Daemon], None], restart):
    """In a back-off, exhausted, in the middle of a stall: it ends with 0, soon."""
    with daemon(folder, {"restart": restart}) as run:
        there(run)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait_exit(10) == 0


def test_sigterm_during_a_load_ends_it(folder):
    """An engine that still loads is stopped as well."""
    command = [sys.executable, ENGINES, "loader", str(folder)]
    with daemon(folder, {"command": command, "port": None}) as run:
        run.wait(lambda: run.engine().get("lanes"), "the load began")
        run.process.send_signal(signal.SIGTERM)
        assert run.wait_exit(10) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_end_in_the_moment_of_the_spawn_leaves_no_engine(folder, number):
    """SIGTERM or SIGKILL right after the start: the spawn under way, or the next daemon, ends it."""
    with daemon(folder) as run:
        for begun in (1, 2, 3):
            until(lambda n=begun: run.log().count('"serving"') == n, what="serving")
            run.process.send_signal(number)
            code = run.wait_exit(10)
            assert code == (0 if number == signal.SIGTERM else -9)
            if number == signal.SIGTERM:
                until(lambda: not engines(folder), seconds=1.0, what="no engine is left")
            run.start()
        run.wait_ready()
        until(lambda: len(engines(folder)) == 1, what="one engine, the last one")


def engines(folder: Path) -> list[int]:
    """Front ends of this place that live."""
    return [p.pid for p in mentioning(folder) if "api" in p.cmdline()]


def test_many_restarts_at_once_make_one_engine(folder):
    """Eight operators ask at the same time: one tree at the end, and no failure in the ledger."""
    with daemon(folder) as run:
        run.wait_ready()
        askers = [threading.Thread(target=run.cli, args=("restart", run.name)) for _ in range(8)]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join(30)
        run.wait_ready(2)
        until(lambda: len(engines(folder)) == 1, what="one engine")
        view = run.wait_ready(2)
        assert view["restarts_in_window"] == 0
        assert run.stalls() == []
        ends = [event for event in run.events() if event["type"] == "gone"]
        assert len(ends) == view["incarnation"] - 1, "an incarnation was buried twice, or never"


def test_a_daemon_that_was_stopped_itself_accuses_nobody(folder):
    """SIGSTOP on the supervisor for longer than every limit, then SIGCONT: no stall, no restart."""
    with daemon(folder) as run:
        run.wait_ready()
        run.process.send_signal(signal.SIGSTOP)
        over = time.monotonic() + 2.5  # more than twice the limit must pass
        until(lambda: time.monotonic() > over, what="the time")
        run.process.send_signal(signal.SIGCONT)
        run.order("api", "print1")
        run.wait(lambda: "x" * 200 in run.log(), "the engine is heard again")
        assert run.wait_ready()["incarnation"] == 1
        assert run.stalls() == []


def test_an_observed_engine_that_ends_leaves_nothing_and_ends_the_daemon(folder):
    """observe and exit_when all: the engine's end is the daemon's, status 1 after READY."""
    program = "import time; time.sleep(1.5)"  # READY without a port means alive for a second
    settings = {
        "command": [sys.executable, "-c", program, str(folder)],
        "port": None,
        "enforce": "observe",
    }
    with daemon(folder, settings, supervisor={"exit_when": "all"}) as run:
        assert run.wait_exit() == 1
        assert '"kind": "CHILD_DIED"' in run.log()


def test_the_state_folder_keeps_its_rights_and_what_is_in_it_is_private(folder):
    """A folder that existed is not changed; files and folders in it are for one user only."""
    state = folder / "state"
    state.mkdir()
    os.chmod(state, 0o755)
    with daemon(folder) as run:
        run.wait_ready()
        run.order("worker", "exit1")
        run.wait_stall()
        run.wait_ready(2)
        assert stat.S_IMODE(state.stat().st_mode) == 0o755
        open_to_others = [p for p in state.iterdir() if stat.S_IMODE(p.stat().st_mode) & 0o077]
        assert open_to_others == []
