"""F1: a silent download during the start; only the bytes written say that it lives."""

# /// scenario
# kind = ""
# limits = { default = "1500ms", start = "60s" }
# watch = 6
# ///

from __future__ import annotations

import os
import time

import stage

from stallwatch import heartbeat


def worker() -> None:
    board = heartbeat.attach(role="worker", rank=0)
    lane = board.lane("model")
    stage.up()
    lane.enter("download", cls="start", limit=3.0)
    until = time.monotonic() + 5
    with open(os.path.join(stage.folder(), "weights"), "wb") as file:
        while time.monotonic() < until:
            file.write(b"w" * 65536)
            file.flush()
            time.sleep(0.1)
    board.ready()
    lane.idle()
    stage.park()


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("worker")
    stage.front_end(board)


stage.perform(main=main, worker=worker)
