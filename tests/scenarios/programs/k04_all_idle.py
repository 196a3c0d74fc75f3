"""K04 without counters: five processes, all idle in their normal place, one reply was dropped."""

# /// scenario
# kind = "LOST_WAKEUP"
# culprit = ""
# action = "restart"
# limits = { default = "1500ms", no_progress = "1500ms" }
# slow = true
# ///

from __future__ import annotations

import queue

import stage

from stallwatch import heartbeat


def worker(rank: str) -> None:
    board = heartbeat.attach(role="worker", rank=int(rank))
    lane = board.lane("retrieve")
    board.ready()
    stage.up()
    for step in stage.steps():
        lane.enter("load_blocks", step=step)
        lane.progress(1)
    lane.idle()
    queue.Queue().get()


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    for rank in range(4):
        stage.child("worker", rank)
    stage.front_end(board)


stage.perform(main=main, worker=worker)
