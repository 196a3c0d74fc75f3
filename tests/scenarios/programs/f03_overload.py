"""F3: a thousand requests wait, every step is slow, the front end answers nobody in time; it moves."""

# /// scenario
# kind = ""
# limits = { default = "2s", no_progress = "2s" }
# watch = 6
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
    while True:
        lane.enter("execute_model")
        time.sleep(stage.RANDOM.uniform(0.3, 0.8))
        lane.progress(1)


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("worker")
    stage.front_end(board, pending=1000)


stage.perform(main=main, worker=worker)
