"""K07 in a thread: the input thread spins over a ghost key, the main thread idles, helpers still turn."""

# /// scenario
# kind = "CPU_RUNAWAY"
# culprit = "core:0/input"
# action = "restart"
# limits = { default = "1500ms" }
# ///

from __future__ import annotations

import queue
import threading

import stage

from stallwatch import heartbeat


def evict(order: dict[str, int], size: int) -> None:
    while size > 1:
        order.pop("ghost", None)


def reads(board: object) -> None:
    lane = board.lane("input")
    for step in stage.steps():
        lane.enter("preprocess", step=step)
        lane.progress(1)
    lane.enter("preprocess")
    evict({}, 2)


def core() -> None:
    board = heartbeat.attach(role="core", rank=0)
    lane = board.lane("main")
    threading.Thread(target=reads, args=(board,), daemon=True, name="input-socket").start()
    stage.noise(board)
    board.ready()
    stage.up()
    lane.idle()
    queue.Queue().get()


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("core")
    stage.front_end(board)


stage.perform(main=main, core=core)
