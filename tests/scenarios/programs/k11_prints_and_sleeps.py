"""K11 in its plainest form: a traceback on stderr, then time.sleep for ever inside the phase."""

# /// scenario
# kind = "ERROR_SWALLOWED"
# culprit = "worker:0/model"
# action = "restart"
# limits = { default = "1500ms" }
# ///

from __future__ import annotations

import time
import traceback

import stage

from stallwatch import heartbeat


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
    try:
        raise RuntimeError("the device handle is gone")
    except RuntimeError:
        traceback.print_exc()
    while True:
        time.sleep(60)


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("worker")
    stage.front_end(board)


stage.perform(main=main, worker=worker)
