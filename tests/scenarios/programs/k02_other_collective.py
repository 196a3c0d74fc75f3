"""K02 with eight ranks: seven reduce, one gathers; its step counter is behind."""

# /// scenario
# kind = "COLLECTIVE_DIVERGENCE"
# culprit = "worker:{odd}/stage"
# action = "restart"
# ranks = 8
# slow = true
# limits = { default = "1500ms" }
# ///

from __future__ import annotations

import queue
import time

import stage

from stallwatch import heartbeat

RANKS = 8


def all_reduce() -> None:
    queue.Queue().get()


def all_gather() -> None:
    queue.Queue().get()


def worker(rank: str) -> None:
    board = heartbeat.attach(role="worker", rank=int(rank))
    lane = board.lane("stage")
    odd = int(rank) == stage.ARGS.seed % RANKS
    stage.noise(board, 1)
    board.ready()
    stage.up()
    for step in range(20 - odd):
        lane.enter("compute", step=step)
        lane.progress(1)
        time.sleep(stage.TICK_S)
    lane.enter("all_gather" if odd else "all_reduce")
    (all_gather if odd else all_reduce)()


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    for rank in range(RANKS):
        stage.child("worker", rank)
    stage.front_end(board)


stage.perform(main=main, worker=worker)
