"""K15: a worker attaches, begins to load and reads from a pipe that nobody fills."""

# /// scenario
# kind = "NEVER_READY"
# culprit = "worker:0/model"
# action = "restart"
# limits = { default = "1500ms", start = "30s" }
# ///

from __future__ import annotations

import os

import stage

from stallwatch import heartbeat


def read_shard(end: int) -> None:
    os.read(end, 1)


def worker() -> None:
    board = heartbeat.attach(role="worker", rank=0)
    lane = board.lane("model")
    stage.up()
    lane.enter("load_weights", cls="start", limit=2.0)
    reader, _ = os.pipe()
    read_shard(reader)


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("worker")
    stage.front_end(board)


stage.perform(main=main, worker=worker)
