"""F6: stacks of a healthy engine with many threads, taken again and again; nothing is stopped by it."""

# /// scenario
# kind = ""
# limits = { default = "2s", no_progress = "2s" }
# watch = 4
# do = "stacks"
# slow = true
# ///

from __future__ import annotations

import threading
import time

import stage

from stallwatch import heartbeat


def worker() -> None:
    board = heartbeat.attach(role="worker", rank=0)
    lane = board.lane("model")
    for _ in range(100):
        threading.Thread(target=stage.park, daemon=True).start()
    board.ready()
    stage.up()
    while True:
        lane.enter("execute_model")
        time.sleep(stage.TICK_S)
        lane.progress(1)


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("worker")
    stage.front_end(board)


stage.perform(main=main, worker=worker)
