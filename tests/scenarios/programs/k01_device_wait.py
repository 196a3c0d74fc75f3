"""K01: the worker's main thread sleeps in the driver, a helper thread still turns."""

# /// scenario
# kind = "DEVICE_WAIT"
# culprit = "worker:0/model"
# action = "restart"
# limits = { default = "1500ms" }
# ///

from __future__ import annotations

import stage

from stallwatch import heartbeat


def run_kernel() -> None:
    stage.block_in_c()


def worker() -> None:
    board = heartbeat.attach(role="worker", rank=0)
    lane = board.lane("model")
    stage.noise(board)
    board.ready()
    stage.up()
    for step in stage.steps():
        lane.enter("execute_model", step=step)
        lane.progress(1)
    lane.enter("execute_model")
    run_kernel()


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("worker")
    stage.front_end(board)


stage.perform(main=main, worker=worker)
