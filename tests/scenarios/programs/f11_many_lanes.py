"""F11: one lane among two hundred stops; the detector must not be slower for it."""

# /// scenario
# kind = "DEVICE_WAIT"
# culprit = "worker:0/model"
# action = "restart"
# late_s = 1.0
# slow = true
# limits = { default = "2s" }
# ///

from __future__ import annotations

import threading
import time

import stage

from stallwatch import heartbeat


def turn(board: object, number: int) -> None:
    lane = board.lane(f"l{number}")
    while True:
        lane.enter("poll")
        time.sleep(0.25)


def synchronize() -> None:
    stage.block_in_c()


def worker() -> None:
    board = heartbeat.attach(role="worker", rank=0)
    lane = board.lane("model")
    for number in range(60):
        threading.Thread(target=turn, args=(board, number), daemon=True).start()
    board.ready()
    stage.up()
    for _ in range(30):
        lane.enter("execute_model")
        time.sleep(stage.TICK_S)
        lane.progress(1)
    lane.enter("execute_model")
    synchronize()


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("worker")
    stage.front_end(board)


stage.perform(main=main, worker=worker)
