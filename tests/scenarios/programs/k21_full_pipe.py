"""K21: the parent reads until the ready line and never again; 64 KiB later the child blocks in print()."""

# /// scenario
# kind = "OUTPUT_BLOCKED"
# culprit = "worker:0/model"
# action = "restart"
# limits = { default = "1500ms" }
# ///

from __future__ import annotations

import subprocess
import sys

import stage

from stallwatch import heartbeat


def emit(line: str) -> None:
    sys.stdout.write(line)
    sys.stdout.flush()


def worker() -> None:
    board = heartbeat.attach(role="worker", rank=0)
    lane = board.lane("model")
    board.ready()
    stage.up()
    for step in stage.steps():
        lane.enter("execute_model", step=step)
        lane.progress(1)
    while True:
        lane.enter("stats")
        emit("x" * 512 + "\n")
        lane.progress(1)


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("worker", stdout=subprocess.PIPE)
    stage.front_end(board)


stage.perform(main=main, worker=worker)
