"""K02 with two ranks under a core: rank 1 came back without the step, rank 0 stands in the broadcast."""

# /// scenario
# kind = "COLLECTIVE_DIVERGENCE"
# culprit = "worker:1/main"
# action = "restart"
# limits = { default = "1500ms" }
# ///

from __future__ import annotations

import queue
import time

import stage

from stallwatch import heartbeat


def broadcast() -> None:
    queue.Queue().get()


def worker(rank: str) -> None:
    board = heartbeat.attach(role="worker", rank=int(rank))
    lane = board.lane("main")
    board.ready()
    stage.up()
    for step in range(20):
        lane.enter("execute_model", step=step)
        lane.progress(1)
        time.sleep(stage.TICK_S)
    if rank == "1":
        lane.idle(on="core:0/main")
        queue.Queue().get()
    lane.enter("execute_model")
    broadcast()


def core() -> None:
    board = heartbeat.attach(role="core", rank=0)
    lane = board.lane("main")
    board.ready()
    stage.up()
    time.sleep(0.5)
    lane.wait("wait_worker", on="worker:*/main")
    queue.Queue().get()


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    for rank in range(2):
        stage.child("worker", rank)
    stage.child("core")
    stage.front_end(board)


stage.perform(main=main, worker=worker, core=core)
