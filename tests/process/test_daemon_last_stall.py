"""The latest stall of an engine outlives the daemon that told it."""

from __future__ import annotations

import sys

import pytest

from daemon_helpers import daemon, place

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(120)]


def test_status_of_a_new_daemon_reads_the_ledger_of_the_old_one() -> None:
    """LAST-STALL after a restart of the daemon is the stall that its predecessor kept."""
    ends = {"command": [sys.executable, "-c", "raise SystemExit(3)"], "port": None}
    lives = {"command": [sys.executable, "-c", "import time; time.sleep(600)"], "port": None}
    with place() as folder:
        with daemon(folder, {**ends, "plugin": "off", "enforce": "fail"}) as first:
            told = first.wait_stall()["id"]
            assert first.wait(lambda: first.engine()["last_stall"] == told, "it in the view")
        with daemon(folder, {**lives, "plugin": "off"}) as second:
            second.wait_state("starting", "ready")
            assert second.engine()["last_stall"] == told
            assert told.rpartition("-")[2] in second.cli("status").stdout
