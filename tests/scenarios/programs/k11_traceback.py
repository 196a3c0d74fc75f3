"""K11: the stage logs its traceback with its pid and goes back to its idle place."""

# /// scenario
# kind = "ERROR_SWALLOWED"
# culprit = "worker:0/stage"
# action = "restart"
# limits = { default = "1500ms" }
# ///

from __future__ import annotations

import os
import queue
import sys
import time

import stage

from stallwatch import heartbeat


def worker() -> None:
    board = heartbeat.attach(role="worker", rank=0)
    lane = board.lane("stage")
    board.ready()
    stage.up()
    for step in stage.steps():
        lane.enter("run_stage", step=step)
        lane.progress(1)
    sys.stderr.write(
        f"(Worker pid={os.getpid()}) ERROR RuntimeError: CUDA error: an illegal access\n"
    )
    sys.stderr.flush()
    lane.idle(on="core:0/main")
    queue.Queue().get()


def core() -> None:
    board = heartbeat.attach(role="core", rank=0)
    lane = board.lane("main")
    board.ready()
    stage.up()
    time.sleep(1.0)
    lane.wait("stage_result", on="worker:0/stage")
    queue.Queue().get()


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("worker")
    stage.child("core")
    stage.front_end(board)


stage.perform(main=main, worker=worker, core=core)
