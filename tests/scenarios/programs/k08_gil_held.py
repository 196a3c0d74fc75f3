"""K08: a thread sleeps in C with the GIL, and nothing of Python runs in the process."""

# /// scenario
# kind = "GIL_HELD"
# culprit = "worker:0/model"
# action = "restart"
# limits = { default = "1500ms" }
# ///

from __future__ import annotations

import ctypes

import stage

from stallwatch import heartbeat


def host_unregister() -> None:
    ctypes.PyDLL(None).pause()


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
    host_unregister()


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("worker")
    stage.front_end(board)


stage.perform(main=main, worker=worker)
