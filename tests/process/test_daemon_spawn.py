"""A start that fails at the spawn, or right after it: said in words, counted as it is, nothing left."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from daemon_helpers import ENGINES, Daemon, daemon, place

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.fixture
def folder() -> Iterator[Path]:
    with place() as path:
        yield path


def program(folder: Path, text: str, mode: int = 0o700) -> list[str]:
    """A command that is this file."""
    path = folder / "engine"
    path.write_text(text)
    path.chmod(mode)
    return [str(path), str(folder)]


def settings(folder: Path, case: str) -> dict[str, Any]:
    """An engine that cannot be executed, each time for another reason."""
    found: dict[str, Any] = {"port": None}
    if case == "not-executable":
        return {**found, "command": program(folder, "#!/bin/sh\nexit 0\n", 0o600)}
    if case == "no-interpreter":
        return {**found, "command": program(folder, "#!/no/such/interpreter\n")}
    if case == "no-program":
        return {**found, "command": program(folder, "\x00\x01")}
    if case == "a-folder":
        return {**found, "command": [str(folder)]}
    return {**found, "command": ["sleep", "1000"], "cwd": str(folder / "nowhere")}


REFUSED = {
    "not-executable": ("is not executable", "chmod +x"),
    "no-interpreter": ("its interpreter does not exist", "#! line"),
    "no-program": ("neither a program nor a script", "#!/bin/sh"),
    "a-folder": ("is a folder, not a program", "Name the file in it"),
    "no-cwd": ("the working folder", "change cwd"),
}


def children(run: Daemon) -> list[str]:
    """The daemon's children, zombies included, as (pid, state)."""
    found = psutil.Process(run.process.pid).children()
    return [f"{child.pid} {child.status()}" for child in found]


def spent(run: Daemon) -> int:
    """Restarts that the next daemon would know of."""
    kept = json.loads((run.state / "engines" / f"{run.name}.json").read_text())
    return len(kept["budget"]["stamps"])


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_a_command_that_cannot_be_executed_ends_the_daemon_with_3(folder, case):
    """One sentence with its mend, exit status 3, no restart: trying again cannot help."""
    with daemon(folder, settings(folder, case), supervisor={"exit_when": "all"}) as run:
        assert run.wait_exit() == 3
        for words in REFUSED[case]:
            assert words in run.log()
        assert "Traceback" not in run.log()
        assert "started, pid" not in run.log()
        assert run.log().count("starting -> failed") == 1
        assert spent(run) == 0


@pytest.mark.parametrize("case", ["not-executable", "no-program", "no-cwd"])
def test_a_daemon_that_stays_says_why_and_what_to_do(folder, case):
    """FAILED with the reason in the status, no child and no zombie; mended, a restart starts it."""
    with daemon(folder, settings(folder, case)) as run:
        view = run.wait_state("failed")
        assert REFUSED[case][0] in view["reason"]
        assert view["restarts_in_window"] == 0
        assert children(run) == []
        said = run.cli("status")
        assert REFUSED[case][0] in said.stdout
        assert f"stallwatch restart {run.name}" in said.stderr
        (folder / "nowhere").mkdir()
        if case != "no-cwd":
            program(folder, "#!/bin/sh\nexec sleep 1000\n")
        assert run.cli("restart", run.name).returncode == 0
        assert run.wait_ready(2)["restarts_in_window"] == 0


def test_a_command_that_vanishes_between_two_starts_is_no_endless_restart(folder):
    """The engine served and died, and its program is no longer executable: one restart is spent, then
    FAILED with the reason; nothing of the first incarnation is left as a zombie.
    """
    command = program(folder, f"#!/bin/sh\nexec {sys.executable} {ENGINES} sleeper {folder}\n")
    with daemon(folder, {"command": command, "port": None}) as run:
        run.wait_ready()
        (folder / "engine").chmod(0o600)
        os.kill(run.engine()["root_pid"], 9)
        run.wait(lambda: "is not executable" in run.engine()["reason"], "the reason")
        assert run.wait_state("failed")["restarts_in_window"] == 1
        run.wait(lambda: children(run) == [], "no child and no zombie")


def test_engines_that_end_at_once_leave_no_zombie(folder):
    """EXHAUSTED after the budget's restarts, each exit in the ledger, and every child reaped."""
    given = {"command": ["sh", "-c", "exit 5", str(folder)], "port": None}
    given["restart"] = {"budget": 2, "backoff": ["10ms"]}
    with daemon(folder, given) as run:
        view = run.wait_state("exhausted", seconds=40)
        assert view["restarts_in_window"] == 2
        assert "the budget is 2" in view["exhausted_reason"]
        run.wait(lambda: len(run.stalls()) == 3, "each exit in the ledger")
        assert {run.report(s["id"])["kind"] for s in run.stalls()} == {"CHILD_DIED"}
        run.wait(lambda: children(run) == [], "no child and no zombie")
