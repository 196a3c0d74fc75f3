"""K17: a weight update pauses the worker, and its trainer never ends the lease."""

# /// scenario
# kind = "PAUSED_TOO_LONG"
# culprit = "worker:0"
# action = "alert"
# limits = { default = "1500ms" }
# ///

from __future__ import annotations

import queue

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
    lane.idle()
    with board.pause("weight_update", seconds=1.0, owner="trainer"):
        queue.Queue().get()


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("worker")
    stage.front_end(board)


stage.perform(main=main, worker=worker)
