"""F7: the worker dies and its parent ignores SIGTERM and answers on: the whole tree must be gone."""

# /// scenario
# kind = "CHILD_DIED"
# culprit = "worker:0*"
# action = "restart"
# limits = { default = "1500ms" }
# ///

from __future__ import annotations

import os
import signal

import stage

from stallwatch import heartbeat


def worker() -> None:
    board = heartbeat.attach(role="worker", rank=0)
    lane = board.lane("model")
    board.ready()
    stage.up()
    for step in stage.steps():
        lane.enter("execute_model", step=step)
        lane.progress(1)
    os._exit(9)


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    board = heartbeat.attach(role="api", rank=0)
    stage.child("worker", start_new_session=True)
    stage.front_end(board)


stage.perform(main=main, worker=worker)
