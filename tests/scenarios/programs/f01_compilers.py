"""F1: a start phase far beyond its limit, in which compilers burn CPU."""

# /// scenario
# kind = ""
# limits = { default = "1500ms", start = "60s" }
# watch = 6
# ///

from __future__ import annotations

import subprocess
import sys

import stage

from stallwatch import heartbeat

BURN = """import sys, time; t = time.monotonic()
while time.monotonic() - t < 5: pass"""


def worker() -> None:
    board = heartbeat.attach(role="worker", rank=0)
    lane = board.lane("model")
    stage.up()
    lane.enter("warm_up", cls="start", limit=3.0)
    subprocess.run([sys.executable, "-c", BURN], check=False)
    board.ready()
    lane.idle()
    stage.park()


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("worker")
    stage.front_end(board)


stage.perform(main=main, worker=worker)
