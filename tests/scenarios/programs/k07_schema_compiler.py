"""K07 under an outer phase: exponential branching in a schema compiler, three calls deep, beside noise."""

# /// scenario
# kind = "CPU_RUNAWAY"
# culprit = "core:0/main"
# action = "restart"
# limits = { default = "1500ms", grammar = "1500ms" }
# slow = true
# ///

from __future__ import annotations

import stage

from stallwatch import heartbeat


def expand(depth: int) -> int:
    return 1 if depth == 0 else expand(depth - 1) + expand(depth - 1)


def compile_schema() -> int:
    return expand(60)


def core() -> None:
    board = heartbeat.attach(role="core", rank=0)
    lane = board.lane("main")
    stage.noise(board, 3)
    board.ready()
    stage.up()
    for step in stage.steps():
        lane.enter("step", step=step)
        lane.progress(1)
    with lane.phase("step"), lane.phase("grammar"):
        compile_schema()


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("core")
    stage.front_end(board)


stage.perform(main=main, core=core)
