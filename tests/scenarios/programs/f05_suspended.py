"""F5: the machine sleeps for three seconds, supervisor and engine alike."""

# /// scenario
# kind = ""
# limits = { default = "1500ms", no_progress = "1500ms" }
# watch = 4
# do = "suspend"
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
        time.sleep(stage.TICK_S)
        lane.progress(1)


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("worker")
    stage.front_end(board)


stage.perform(main=main, worker=worker)
