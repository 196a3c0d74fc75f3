"""F4: a weight update under a lease, longer than every limit; clients wait meanwhile."""

# /// scenario
# kind = ""
# limits = { default = "1s", no_progress = "1s" }
# watch = 5
# ///

from __future__ import annotations

import time

import stage

from stallwatch import heartbeat


def worker() -> None:
    board = heartbeat.attach(role="worker", rank=0)
    lane = board.lane("model")
    board.ready()
    stage.up()
    for step in stage.steps():
        lane.enter("execute_model", step=step)
        lane.progress(1)
    while True:
        with board.pause("weight_update", seconds=30, owner="trainer"):
            time.sleep(4)
        lane.enter("execute_model")
        lane.progress(1)


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("worker")
    stage.front_end(board)


stage.perform(main=main, worker=worker)
