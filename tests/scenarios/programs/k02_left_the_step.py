"""K02: one of four ranks has no work in this step and skips its collective; the others wait in it."""

# /// scenario
# kind = "COLLECTIVE_DIVERGENCE"
# culprit = "worker:{odd}/model"
# action = "restart"
# ranks = 4
# limits = { default = "1500ms" }
# ///

from __future__ import annotations

import queue

import stage

from stallwatch import heartbeat

RANKS = 4


def all_reduce(barrier: stage.Barrier) -> None:
    barrier.wait()


def worker(rank: str, folder: str) -> None:
    board = heartbeat.attach(role="worker", rank=int(rank))
    lane = board.lane("model")
    barrier = stage.Barrier(folder, RANKS)
    board.ready()
    stage.up()
    for step in range(20):
        lane.enter("execute_model", step=step)
        all_reduce(barrier)
        lane.progress(1)
        lane.idle()
    if int(rank) == stage.ARGS.seed % RANKS:
        lane.idle()  # it was given no tokens, and says nothing
        queue.Queue().get()
    lane.enter("execute_model")
    all_reduce(barrier)


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    folder = stage.folder()
    for rank in range(RANKS):
        stage.child("worker", rank, folder)
    stage.front_end(board)


stage.perform(main=main, worker=worker)
