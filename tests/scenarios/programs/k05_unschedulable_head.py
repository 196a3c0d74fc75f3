"""K05: the scheduler turns and stops at the first request it cannot place, for ever."""

# /// scenario
# kind = "NO_FORWARD_PROGRESS"
# culprit = "core:0/main"
# action = "restart"
# limits = { default = "1500ms", no_progress = "1500ms" }
# ///

from __future__ import annotations

import time

import stage

from stallwatch import heartbeat


def schedule(free: int, needs: tuple[int, ...]) -> list[int]:
    placed = []
    for need in needs:
        if need > free:
            break
        placed.append(need)
    time.sleep(stage.TICK_S)
    return placed


def core() -> None:
    board = heartbeat.attach(role="core", rank=0)
    lane = board.lane("main")
    stage.noise(board)
    board.ready()
    stage.up()
    for step in stage.steps():
        lane.enter("step", step=step)
        lane.progress(1)
    while True:
        lane.enter("schedule")
        if schedule(0, (10, 1, 1)):
            lane.progress(1)


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("core")
    stage.front_end(board, pending=6)


stage.perform(main=main, core=core)
