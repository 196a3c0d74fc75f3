"""K07: catastrophic backtracking; the regex engine keeps the GIL for the whole match."""

# /// scenario
# kind = "CPU_RUNAWAY"
# culprit = "worker:0/model"
# action = "restart"
# limits = { default = "1500ms" }
# ///

from __future__ import annotations

import re

import stage

from stallwatch import heartbeat


def parse(text: str) -> None:
    re.match("(a+)+$", text)


def worker() -> None:
    board = heartbeat.attach(role="worker", rank=0)
    lane = board.lane("model")
    stage.noise(board)
    board.ready()
    stage.up()
    for step in stage.steps():
        lane.enter("grammar", step=step)
        lane.progress(1)
    lane.enter("grammar")
    parse("a" * 40 + "b")


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("worker")
    stage.front_end(board)


stage.perform(main=main, worker=worker)
