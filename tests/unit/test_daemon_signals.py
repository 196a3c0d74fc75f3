"""The first signal stops, the second kills: neither is lost, and the first one says so."""

from __future__ import annotations

import itertools

from stallwatch.config import from_command
from stallwatch.daemon.main import stopping
from stallwatch.daemon.signals import Signals


def test_two_signals_at_once_are_two():
    """Whoever takes the first one and leaves finds the second at the next wait."""
    signals = Signals()
    try:
        signals.wake()
        signals.wake()
        assert list(itertools.islice(signals.wait(5.0), 1)) == [0]
        assert list(signals.wait(0.0)) == [0]
        assert list(signals.wait(0.0)) == []
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
