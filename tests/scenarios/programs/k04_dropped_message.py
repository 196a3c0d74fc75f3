"""K04: the notification was dropped; the writer counts seven messages, the reader saw six."""

# /// scenario
# kind = "LOST_WAKEUP"
# culprit = "core:0/main -> worker:0/main"
# action = "restart"
# limits = { default = "1500ms", no_progress = "1500ms" }
# ///

from __future__ import annotations

import queue
import time

import stage

from stallwatch import heartbeat


def worker() -> None:
    board = heartbeat.attach(role="worker", rank=0)
    lane = board.lane("main")
    stage.noise(board)
    board.ready()
    stage.up()
    for step in stage.steps():
        lane.enter("execute_model", step=step)
        lane.progress(1)
    lane.enter("idle", cls="idle", on="core:0/main", seen=6)
    queue.Queue().get()


def core() -> None:
    board = heartbeat.attach(role="core", rank=0)
    lane = board.lane("main")
    board.ready()
    stage.up()
    time.sleep(0.5)
    lane.enter("idle", cls="idle", on="api:0/loop", sent=7)
    queue.Queue().get()


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("worker")
    stage.child("core")
    stage.front_end(board, pending=3)


stage.perform(main=main, worker=worker, core=core)
