"""K05, other names and more lanes: an admission loop of its own thread never admits; its process is busy elsewhere."""

# /// scenario
# kind = "NO_FORWARD_PROGRESS"
# culprit = "scheduler:0/admission"
# action = "restart"
# limits = { default = "1500ms", no_progress = "1500ms" }
# slow = true
# ///

from __future__ import annotations

import queue
import time

import stage

from stallwatch import heartbeat


def admit(free: int) -> bool:
    time.sleep(stage.TICK_S)
    return free > 0


def scheduler() -> None:
    board = heartbeat.attach(role="scheduler", rank=0)
    lane = board.lane("admission")
    stage.noise(board, 3)
    board.ready()
    stage.up()
    for step in stage.steps():
        lane.enter("admit", step=step)
        lane.progress(1)
    while True:
        lane.enter("admit")
        admit(0)


def worker(rank: str) -> None:
    board = heartbeat.attach(role="worker", rank=int(rank))
    lane = board.lane("model")
    board.ready()
    stage.up()
    lane.idle(on="scheduler:0/admission")
    queue.Queue().get()


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("scheduler")
    for rank in range(2):
        stage.child("worker", rank)
    stage.front_end(board, pending=9)


stage.perform(main=main, scheduler=scheduler, worker=worker)
