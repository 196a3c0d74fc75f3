"""K19: a worker asks a device whose driver never answers; not even SIGKILL ends it."""

# /// scenario
# kind = "UNKILLABLE"
# culprit = "worker:0/model"
# action = "fail"
# do = "dead-device"
# state = "unkillable"
# limits = { default = "1500ms" }
# ///

from __future__ import annotations

import os

import stage

from stallwatch import heartbeat


def ask_driver() -> None:
    os.stat(os.path.join(os.environ["SCENARIO_DEVICE"], "registers"))


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
    ask_driver()


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("worker")
    stage.front_end(board)


stage.perform(main=main, worker=worker)
