"""Stall after stall of a real vLLM behind the gateway: the script itself, with few of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from running import available

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not available(), reason="no vLLM environment here (make venv-vllm)"),
]

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "soak_gateway.py"
STALLS = 3


def test_every_request_ends_and_all_counts_agree() -> None:
    """Three stalls with eight clients: none hangs, is cut off or believes half an answer, and clients,
    gateway, ledger and metrics count the same.
    """
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--vllm", str(STALLS), "--clients", "8"],
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
    assert result["failures_seen"] >= 1
    assert result["ends"]["complete"] > 0
