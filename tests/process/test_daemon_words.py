"""What the daemon says to its operator: where clients connect, why each try failed, what is missing."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from daemon_helpers import Daemon, daemon, free_port, place, toml

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.fixture
def folder() -> Iterator[Path]:
    with place() as path:
        yield path


def test_where_clients_connect_is_said_at_the_start_at_ready_and_in_the_status(folder):
    """The engine's own port, in the first line, in READY's, in `status`, `describe` and the JSON."""
    with daemon(folder) as run:
        view = run.wait_ready()
        place_ = f"http://127.0.0.1:{run.port}"
        assert view["clients"] == place_
        assert f"clients connect to {place_} ({run.name})" in run.log()
        assert f"other commands need --socket {run.state}/control.sock" in run.log()
        assert f"clients connect to {place_}" in view["reason"]
        assert f"clients of {run.name} connect to {place_}" in run.cli("status").stdout
        assert place_ in run.cli("describe", run.name).stdout


def test_each_try_on_a_held_port_says_why_it_failed(folder):
    """Six tries: five back-offs and the end, each line with the holder."""
    with socket.socket() as mine:
        mine.bind(("127.0.0.1", 0))
        mine.listen()
        port = mine.getsockname()[1]
        settings = {"port": port, "restart": {"backoff": ["10ms"]}}
        with daemon(folder, settings, supervisor={"exit_when": "all"}) as run:
            assert run.wait_exit() == 3
            held = f"port {port} is held by pid"
            assert run.log().count(f"starting -> backoff: {held}") == 5
            assert run.log().count(f"starting -> failed: {held}") == 1
            lines = [line for line in run.log().splitlines() if held in line]
            assert ['"level": "warning"' in line for line in lines] == [True] * 5 + [False]
            assert '"level": "error"' in lines[-1]


def test_status_says_why_an_engine_does_not_start_and_when_it_is_tried_again(folder):
    """A held port: holder and time in `status`, no 'mend it'; no such command: that, and what to do."""
    with socket.socket() as mine:
        mine.bind(("127.0.0.1", 0))
        mine.listen()
        port = mine.getsockname()[1]
        broken = {"command": ["no-such-program-anywhere"]}
        settings = {"port": port, "restart": {"backoff": ["10m"], "backoff_cap": "10m"}}
        with daemon(folder, settings, more={"broken": broken}) as run:
            run.wait_state("backoff")
            run.wait_state("failed", name="broken")
            shown = run.cli("status")
            assert f": port {port} is held by pid" in shown.stdout
            assert "broken is FAILED: command not found: no-such-program-anywhere" in shown.stdout
            assert "stallwatch restart broken" in shown.stderr
            one = run.cli("status", run.name).stderr
            assert f"{run.name} is started again by itself in " in one
            assert "mend" not in one


def test_a_token_file_that_others_can_read_ends_with_78(folder):
    """Whoever reads it may restart engines: refused by name with the mend, the token unsaid."""
    token = folder / "token"
    token.write_text("a-token-that-is-long-enough")
    token.chmod(0o644)
    with daemon(folder, supervisor={"token_file": str(token)}) as run:
        assert run.wait_exit() == 78
        assert f"{token}: it holds the control token, and mode 0644" in run.log()
        assert "chmod 600" in run.log()
        assert "a-token-that" not in run.log()
        assert "Traceback" not in run.log()
        token.chmod(0o600)
        run.start()
        run.wait_ready()


def limited(soft: int, hard: int) -> list[str]:
    return ["prlimit", f"--nofile={soft}:{hard}"]


def test_too_few_open_files_end_with_78_before_anything_is_started(folder):
    """`ulimit -n 64`: one sentence with the mend, no traceback, no engine, no board."""
    with daemon(folder, before=limited(64, 64)) as run:
        assert run.wait_exit() == 78
        assert "at most 64 files may be open" in run.log()
        assert "ulimit -n 4096" in run.log()
        assert "Traceback" not in run.log()
        assert "started, pid" not in run.log()
        assert not run.state.exists()


def test_a_low_soft_limit_is_raised(folder):
    """The shell's soft 64 under a high hard limit: the daemon takes what it needs and works."""
    with daemon(folder, before=limited(64, 8192)) as run:
        run.wait_ready()
        process = psutil.Process(run.process.pid)
        assert process.rlimit(resource.RLIMIT_NOFILE) == (4096, 8192)


def test_a_group_of_the_daemons_own_may_read_its_configuration(folder):
    """0640 with a secret in it, as `install -m 0640 -g` makes it: accepted; 0644 is refused."""
    control = f"127.0.0.1:{free_port()}"
    engine = {
        "command": ["true"],
        "env": {"HF_TOKEN": "hf_abcdefgh"},
        "restart": {"policy": "never"},
    }
    text = toml(
        {
            "supervisor": {"control": control, "state_dir": str(folder / "state")},
            "engines": {"e": engine},
        }
    )
    text = text.replace("control = ", 'exit_when = "all"\ncontrol = ')
    assert ended(folder, text, 0o644) == 78
    assert ended(folder, text, 0o640) == 3


def ended(folder: Path, text: str, mode: int) -> int:
    """The exit status of a daemon whose file has this mode."""
    path = folder / "stallwatch.toml"
    path.touch(mode=0o600)
    path.write_text(text)
    path.chmod(mode)

    class Kept(Daemon):
        def write(self, text: str | None = None) -> None:
            """The file stays as it is."""

    run = Kept(folder)
    try:
        return run.wait_exit()
    finally:
        run.end()
