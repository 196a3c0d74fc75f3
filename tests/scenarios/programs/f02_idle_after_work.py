"""F2: it works, then nothing comes for long; front end, core and worker all wait for work."""

# /// scenario
# kind = ""
# limits = { default = "1s", no_progress = "1s" }
# watch = 5
# slow = true
# ///

from __future__ import annotations

import queue

import stage

from stallwatch import heartbeat


def core() -> None:
    board = heartbeat.attach(role="core", rank=0)
    lane = board.lane("main")
    board.ready()
    stage.up()
    for step in stage.steps():
        lane.enter("step", step=step)
        lane.progress(1)
    lane.idle(on="api:0/loop")
    queue.Queue().get()


def worker() -> None:
    board = heartbeat.attach(role="worker", rank=0)
    lane = board.lane("model")
    board.ready()
    stage.up()
    for step in stage.steps():
        lane.enter("execute_model", step=step)
        lane.progress(1)
    lane.idle(on="core:0/main")
    queue.Queue().get()


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("core")
    stage.child("worker")
    stage.front_end(board, pending=0)


stage.perform(main=main, core=core, worker=worker)
