"""K05 in one process with its own names: empty batch, empty step, again and again; mostly idle between."""

# /// scenario
# kind = "NO_FORWARD_PROGRESS"
# culprit = "engine:0/scheduler"
# action = "restart"
# limits = { default = "1500ms", no_progress = "1500ms" }
# ///

from __future__ import annotations

import time

import stage

from stallwatch import heartbeat


def engine() -> None:
    board = heartbeat.attach(role="engine", rank=0)
    lane = board.lane("scheduler")
    board.pending(5)
    board.ready()
    stage.up()
    for step in stage.steps():
        lane.enter("tick", step=step)
        lane.progress(1)
    while True:
        lane.enter("tick")
        batch: list[int] = []
        lane.idle()
        time.sleep(stage.TICK_S + len(batch))


def main() -> None:
    board = heartbeat.attach(role="router", rank=0)
    lane = board.lane("watch")
    stage.child("engine")
    board.ready()
    lane.idle()
    stage.go()
    stage.park()


stage.perform(main=main, engine=engine)
