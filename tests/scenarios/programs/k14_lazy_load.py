"""K14: one rank loads a kernel at its first use and waits for the device; its peers are in the collective."""

# /// scenario
# kind = "LAZY_LOAD_LOCK"
# culprit = "worker:{odd}/model"
# action = "restart"
# ranks = 3
# limits = { default = "1500ms" }
# ///

from __future__ import annotations

import queue

import stage

from stallwatch import heartbeat


def load_binary() -> None:
    stage.block_in_c()


def all_reduce() -> None:
    queue.Queue().get()


def worker(rank: str) -> None:
    board = heartbeat.attach(role="worker", rank=int(rank))
    lane = board.lane("model")
    board.ready()
    stage.up()
    for step in range(20):
        lane.enter("forward", step=step)
        lane.progress(1)
        stage.time.sleep(stage.TICK_S)
    lane.enter("forward")
    if int(rank) == stage.ARGS.seed % 3:
        load_binary()
    all_reduce()


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    for rank in range(3):
        stage.child("worker", rank)
    stage.front_end(board)


stage.perform(main=main, worker=worker)
