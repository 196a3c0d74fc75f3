"""What the daemon says as it begins and as it is asked to end, and that no signal is lost."""

from __future__ import annotations

import pytest

from stallwatch import paths
from stallwatch.config import from_command
from stallwatch.daemon.main import serving, stopping
from stallwatch.daemon.signals import Signals


def test_two_signals_at_once_are_two():
    """Whoever takes the first one and leaves finds the second at the next wait."""
    signals = Signals()
    try:
        signals.wake()
        signals.wake()
        # a child of another test may end meanwhile: its number is none of ours
        assert next(number for number in signals.wait(5.0) if number == 0) == 0
        assert [number for number in signals.wait(0.0) if number == 0] == [0]
        assert [number for number in signals.wait(0.0) if number == 0] == []
    finally:
        signals.close()


def engine(drain: str, grace: str):
    flags = {"engine": {"drain": drain, "stop_grace": grace}}
    return from_command(["sleep"], overrides=flags)[0].engines["engine"]


def test_the_first_signal_says_what_is_waited_for_and_how_long():
    """Who is waited for, the longest of their times, and what a second signal does."""
    running = {"chat": engine("30s", "40s"), "code": engine("0s", "5s")}
    assert stopping("SIGINT", running) == (
        "SIGINT: stopping every engine: chat, code may finish requests and end within 1m10s "
        "(drain, then stop_grace), then they are killed; a second Ctrl-C or SIGTERM kills at once"
    )


def test_with_nothing_to_wait_for_it_says_that():
    """Engines in a back-off or stopped have no process to end."""
    assert stopping("SIGTERM", {}) == "SIGTERM: stopping every engine: none has a process"


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A shell without a word about Stallwatch, at home in a folder of its own."""
    for name in ("STALLWATCH_SOCKET", "STATE_DIRECTORY", "XDG_RUNTIME_DIR", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return from_command(["true"])[0]


def test_the_serving_line_names_a_socket_that_other_commands_would_not_find(bare):
    """Elsewhere than where they look: the flag that they need, quoted for a shell."""
    said = serving(bare, "127.0.0.1:9470", "/srv/my state/control.sock")
    assert "control on http://127.0.0.1:9470" in said
    assert said.endswith("other commands need --socket '/srv/my state/control.sock'")
    assert "--socket" not in serving(bare, "127.0.0.1:9470", paths.listen_socket())
    assert "--socket" not in serving(bare, "", "/run/stallwatch/control.sock")


def test_a_place_that_only_the_daemons_environment_names_is_named(bare, monkeypatch):
    """A unit's STATE_DIRECTORY or STALLWATCH_SOCKET is not in the operator's shell."""
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/stallwatch")
    assert "--socket /var/lib/stallwatch/control.sock" in serving(bare, "", paths.listen_socket())
    monkeypatch.setenv("STALLWATCH_SOCKET", "/srv/control.sock")
    assert "--socket /srv/control.sock" in serving(bare, "", paths.listen_socket())
