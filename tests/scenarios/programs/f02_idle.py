"""F2: nothing to do for long, the outer phase included; idle time never counts."""

# /// scenario
# kind = ""
# limits = { default = "1s", no_progress = "1s" }
# watch = 5
# ///

from __future__ import annotations

import queue

import stage

from stallwatch import heartbeat


def worker() -> None:
    board = heartbeat.attach(role="worker", rank=0)
    lane = board.lane("model")
    board.ready()
    stage.up()
    with lane.phase("busy_loop"):
        lane.idle()
        queue.Queue().get()


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("worker")
    stage.front_end(board, pending=0)


stage.perform(main=main, worker=worker)
