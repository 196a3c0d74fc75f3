"""K23 among four ranks with noise: the stopped one is named, not those that wait for it in the collective."""

# /// scenario
# kind = "PROCESS_STOPPED"
# culprit = "worker:{odd}*"
# action = "restart"
# ranks = 4
# slow = true
# limits = { default = "1500ms" }
# ///

from __future__ import annotations

import os
import queue
import signal

import stage

from stallwatch import heartbeat


def all_reduce() -> None:
    queue.Queue().get()


def worker(rank: str) -> None:
    board = heartbeat.attach(role="worker", rank=int(rank))
    lane = board.lane("model")
    stage.noise(board)
    board.ready()
    stage.up()
    for step in stage.steps():
        lane.enter("execute_model", step=step)
        lane.progress(1)
    lane.enter("execute_model")
    if int(rank) == stage.ARGS.seed % 4:
        os.kill(os.getpid(), signal.SIGSTOP)
    all_reduce()


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    for rank in range(4):
        stage.child("worker", rank)
    stage.front_end(board)


stage.perform(main=main, worker=worker)
