"""K09: the input thread raised and is gone; the main thread waits on its queue."""

# /// scenario
# kind = "THREAD_DIED"
# culprit = "core:0/input"
# action = "restart"
# limits = { default = "1500ms" }
# ///

from __future__ import annotations

import queue
import threading

import stage

from stallwatch import heartbeat


def reads(board: object) -> None:
    lane = board.lane("input")
    for step in stage.steps():
        lane.enter("decode_request", step=step)
        lane.progress(1)
    lane.enter("decode_request")
    raise AssertionError("a request nobody expected")


def core() -> None:
    board = heartbeat.attach(role="core", rank=0)
    lane = board.lane("main")
    stage.noise(board)
    threading.Thread(target=reads, args=(board,), daemon=True, name="input-socket").start()
    board.ready()
    stage.up()
    lane.idle(on="core:0/input")
    queue.Queue().get()


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("core")
    stage.front_end(board)


stage.perform(main=main, core=core)
