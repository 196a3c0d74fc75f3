"""K10: a worker aborts while its parent goes on answering."""

# /// scenario
# kind = "CHILD_DIED"
# culprit = "worker:0*"
# action = "restart"
# limits = { default = "1500ms" }
# ///

from __future__ import annotations

import os

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
    lane.enter("execute_model")
    os.abort()


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("worker")
    stage.front_end(board)


stage.perform(main=main, worker=worker)
