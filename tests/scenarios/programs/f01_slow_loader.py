"""F1: rank 0 loads for long and reports each shard; the others rightly wait for it."""

# /// scenario
# kind = ""
# limits = { default = "1500ms", start = "60s" }
# watch = 6
# ///

from __future__ import annotations

import time

import stage

from stallwatch import heartbeat


def worker(rank: str) -> None:
    board = heartbeat.attach(role="worker", rank=int(rank))
    lane = board.lane("model")
    stage.up()
    if rank == "0":
        lane.enter("load_weights", cls="start", limit=2.0)
        for _ in range(25):
            time.sleep(0.2)
            lane.progress(1)
    else:
        lane.wait("all_loaded", on="worker:0/model")
        time.sleep(5)
    board.ready()
    lane.idle()
    stage.park()


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    for rank in range(2):
        stage.child("worker", rank)
    stage.front_end(board)


stage.perform(main=main, worker=worker)
