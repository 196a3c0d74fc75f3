"""The pages of a real daemon with much to show: 64 processes x 4 lanes at 10 Hz, 1,000 stalls."""

from __future__ import annotations

import contextlib
import sys
import time

import pytest

from daemon_helpers import daemon, place, request
from stallwatch.evidence.ledger import Ledger
from stallwatch.testing.service import stall_report

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(240)]

PROCESSES = 64
ENGINE = """
import os, sys, time
from stallwatch import heartbeat

def live(rank):
    board = heartbeat.attach(role="worker", rank=rank)
    lanes = [board.lane("main")] + [board.channel(f"stream/{n}") for n in range(3)]
    marks = [lane.marker("execute_model", "step", limit=120.0) for lane in lanes]
    board.ready()
    step = 0
    while True:
        step += 1
        for mark, lane in zip(marks, lanes):
            mark(step)
            lane.progress(1)
        time.sleep(0.1)

for rank in range(1, int(sys.argv[1])):
    if os.fork() == 0:
        live(rank)
live(0)
"""


def test_a_large_engine_and_a_full_ledger_leave_the_pages_quick(tmp_path):
    """Every page within two seconds, the slowest of five each, and the judge stays on time."""
    with place() as folder:
        program = folder / "engine.py"
        program.write_text(ENGINE)
        (folder / "state").mkdir(mode=0o700)
        with contextlib.closing(Ledger(folder / "state", max_items=1000)) as ledger:
            for number in range(1000):
                ident = f"st-20261130T031502Z-{number:08x}"
                ledger.insert(stall_report(ident))
        settings = {
            "command": [sys.executable, str(program), str(PROCESSES)],
            "port": None,
            "limits": {"default": "120s"},
        }
        with daemon(folder, settings, supervisor={"max_stalls": 1000}) as run:
            run.wait(lambda: len(run.engine().get("lanes", ())) == 4 * PROCESSES, "all lanes", 120)
            slowest = {}
            pages = ("/", f"/engines/{run.name}", "/stalls", "/stalls?page=20", f"/stalls/{ident}")
            for path in pages:
                for _ in range(5):
                    began = time.monotonic()
                    status, body = request("GET", run.control, path)
                    slowest[path] = max(slowest.get(path, 0.0), time.monotonic() - began)
                    assert status == 200
                    assert body.endswith(b"</html>\n")
            live = run.get("/livez")[0]

    assert max(slowest.values()) < 2.0, slowest
    assert live == 200
