"""F1 while serving: a new shape compiles in the middle of a request; the compilers burn CPU."""

# /// scenario
# kind = ""
# limits = { default = "2s", no_progress = "2s", compile = "30s" }
# watch = 8
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
    board.ready()
    stage.up()
    for step in stage.steps():
        lane.enter("execute_model", step=step)
        lane.progress(1)
    lane.enter("execute_model")
    subprocess.run([sys.executable, "-c", BURN], check=False)
    while True:
        lane.enter("execute_model")
        stage.time.sleep(stage.TICK_S)
        lane.progress(1)


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("worker")
    stage.front_end(board)


stage.perform(main=main, worker=worker)
