"""K01 where a GPU shows it first: the main thread is idle again, the copy of the results never ends."""

# /// scenario
# kind = "DEVICE_WAIT"
# culprit = "worker:0/output"
# action = "restart"
# limits = { default = "1500ms" }
# ///

from __future__ import annotations

import queue
import threading
import time

import stage

from stallwatch import heartbeat


def copy_out(board: object) -> None:
    lane = board.lane("output")
    lane.idle()
    time.sleep(1.0)
    lane.enter("out_copy")
    stage.block_in_c()


def worker() -> None:
    board = heartbeat.attach(role="worker", rank=0)
    lane = board.lane("main")
    thread = threading.Thread(target=copy_out, args=(board,), daemon=True, name="output-copy")
    thread.start()
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
    time.sleep(1.5)
    lane.wait("wait_worker", on="worker:0/main")
    queue.Queue().get()


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("worker")
    stage.child("core")
    stage.front_end(board)


stage.perform(main=main, worker=worker, core=core)
