"""F1: a prefill of many batched tokens takes longer than the limit of an ordinary one."""

# /// scenario
# kind = ""
# limits = { default = "1500ms", prefill = "1500ms" }
# watch = 7
# ///

from __future__ import annotations

import time

import stage

from stallwatch import heartbeat


def worker() -> None:
    board = heartbeat.attach(role="worker", rank=0)
    lane = board.lane("model")
    board.ready()
    stage.up()
    for _ in stage.steps():
        lane.enter("prefill", tokens=256)
        lane.progress(1)
    while True:
        lane.enter("prefill", tokens=65536)
        time.sleep(4)
        lane.progress(1)


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("worker")
    stage.front_end(board)


stage.perform(main=main, worker=worker)
