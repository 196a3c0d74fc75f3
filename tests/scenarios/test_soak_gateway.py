"""The soak of the gateway in short: the script itself, with fewer stalls, and its result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "soak_gateway.py"
STALLS = 60


# A starved machine may declare a death later than the gateway waits with an engine's own 500 (gateway.TROUBLED_S):
# one client in thousands then has the engine's word without an id. Printed each time it happens.
@pytest.mark.flaky(reruns=2)
@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_stall_after_stall_ends_every_request_and_all_counts_agree():
    """Sixty stalls of three embedded engines behind one gateway while clients stream: none hangs, is cut
    off or believes half an answer, and clients, gateway, ledger and metrics count the same.
    """
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--clients", "16"],
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    assert done.stdout, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["wrong"] == [], result
    assert done.returncode == 0
    assert result["stalls"] == STALLS
    assert result["ledger"] >= STALLS
    assert result["failures_seen"] > STALLS // 2, "most stalls are met by a client"
    assert result["ends"]["complete"] > STALLS
    assert result["gateway"]["failed"] > STALLS
    right = sum(count for grade, count in result["grades"].items() if grade.endswith(" right"))
    # How stalls are named is graded elsewhere, on machines that are not starved by three engines.
    assert right >= 0.7 * STALLS, result["grades"]
