"""K22: steps become twenty times slower and go on; nothing is stuck."""

# /// scenario
# kind = "DEGRADED"
# culprit = "worker:0/model"
# action = "alert"
# limits = { default = "30s", degraded = "3s" }
# slow = true
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
    for step in range(1_000_000):
        lane.enter("execute_model", step=step)
        time.sleep(0.02 if step < 800 else 2.2)
        lane.progress(1)


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("worker")
    stage.front_end(board)


stage.perform(main=main, worker=worker)
