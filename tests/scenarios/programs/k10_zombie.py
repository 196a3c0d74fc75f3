"""K10: one of three ranks leaves with status 0, its parent never looks, its peers wait for it."""

# /// scenario
# kind = "CHILD_DIED"
# culprit = "worker:{odd}*"
# action = "restart"
# ranks = 3
# limits = { default = "1500ms" }
# ///

from __future__ import annotations

import os
import queue

import stage

from stallwatch import heartbeat


def all_gather() -> None:
    queue.Queue().get()


def worker(rank: str) -> None:
    board = heartbeat.attach(role="worker", rank=int(rank))
    lane = board.lane("model")
    board.ready()
    stage.up()
    for step in stage.steps():
        lane.enter("execute_model", step=step)
        lane.progress(1)
    lane.enter("execute_model")
    if int(rank) == stage.ARGS.seed % 3:
        os._exit(0)
    all_gather()


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    for rank in range(3):
        stage.child("worker", rank)
    stage.front_end(board)


stage.perform(main=main, worker=worker)
