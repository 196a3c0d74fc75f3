"""K03 inside one process: two threads take two locks in the opposite order."""

# /// scenario
# kind = "ORDER_CYCLE"
# culprit = "worker:0/*"
# action = "restart"
# edges = [["worker:0/spawn", "worker:0/device"], ["worker:0/device", "worker:0/spawn"]]
# limits = { default = "1500ms" }
# ///

from __future__ import annotations

import threading

import stage

from stallwatch import heartbeat

A, B = threading.Lock(), threading.Lock()
BOTH = threading.Barrier(2)


def take(board: object, *, mine: str, first: object, second: object, theirs: str) -> None:
    lane = board.lane(mine)
    for step in stage.steps():
        lane.enter("hand_over", step=step)
        lane.progress(1)
    with first:
        BOTH.wait()
        lane.wait("take_lock", on=f"worker:0/{theirs}")
        with second:
            pass


def worker() -> None:
    board = heartbeat.attach(role="worker", rank=0)
    sides = ({"mine": "spawn", "first": A, "second": B, "theirs": "device"},
             {"mine": "device", "first": B, "second": A, "theirs": "spawn"})  # fmt: skip
    for side in sides:
        threading.Thread(target=take, args=(board,), kwargs=side, daemon=True).start()
    board.ready()
    stage.up()
    stage.park()


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("worker")
    stage.front_end(board)


stage.perform(main=main, worker=worker)
