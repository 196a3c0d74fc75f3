"""K04 seen from the waiter: the core waits for a worker that sleeps in its own idle place."""

# /// scenario
# kind = "LOST_WAKEUP"
# culprit = "core:0/main -> worker:0/main"
# action = "restart"
# limits = { default = "1500ms" }
# ///

from __future__ import annotations

import queue
import time

import stage

from stallwatch import heartbeat


def worker() -> None:
    board = heartbeat.attach(role="worker", rank=0)
    lane = board.lane("main")
    board.ready()
    stage.up()
    for step in stage.steps():
        lane.enter("execute_model", step=step)
        lane.progress(1)
    lane.idle(on="core:0/main")
    queue.Queue().get()


def core() -> None:
    board = heartbeat.attach(role="core", rank=0)
    lane = board.lane("main")
    board.ready()
    stage.up()
    time.sleep(1.0)
    lane.wait("step_result", on="worker:0/main")
    queue.Queue().get()


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("worker")
    stage.child("core")
    stage.front_end(board)


stage.perform(main=main, worker=worker, core=core)
