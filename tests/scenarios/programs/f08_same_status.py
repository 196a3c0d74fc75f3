"""F8: the words of the status never change for seconds, the counter does."""

# /// scenario
# kind = ""
# limits = { default = "1500ms", no_progress = "1500ms" }
# watch = 5
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
    lane.enter("generate", text="generating")
    while True:
        time.sleep(0.1)
        lane.progress(1)


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("worker")
    stage.front_end(board)


stage.perform(main=main, worker=worker)
