"""K08 by a thread without a lane: the lane that is late only waits for the GIL."""

# /// scenario
# kind = "GIL_HELD"
# culprit = "worker:0*"
# action = "restart"
# limits = { default = "1500ms" }
# ///

from __future__ import annotations

import ctypes
import threading
import time

import stage

from stallwatch import heartbeat


def event_destroy() -> None:
    time.sleep(1.5)
    ctypes.PyDLL(None).pause()


def worker() -> None:
    board = heartbeat.attach(role="worker", rank=0)
    lane = board.lane("model")
    board.ready()
    stage.up()
    threading.Thread(target=event_destroy, daemon=True, name="monitor").start()
    while True:
        lane.enter("decode")
        time.sleep(stage.TICK_S)
        lane.progress(1)


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("worker")
    stage.front_end(board)


stage.perform(main=main, worker=worker)
