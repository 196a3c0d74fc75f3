"""K06 while the loop turns: blocks of a remote load are never freed, nothing can be admitted."""

# /// scenario
# kind = "REMOTE_PEER_WAIT"
# culprit = "tcp://10.9.8.7:5600"
# action = "fail"
# limits = { default = "1500ms", no_progress = "1500ms" }
# ///

from __future__ import annotations

import time

import stage

from stallwatch import heartbeat


def core() -> None:
    board = heartbeat.attach(role="core", rank=0)
    lane = board.lane("main")
    board.ready()
    stage.up()
    for step in stage.steps():
        lane.enter("step", step=step)
        lane.progress(1)
    while True:
        lane.wait("kv_transfer", on="tcp://10.9.8.7:5600")
        time.sleep(stage.TICK_S)


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("core")
    stage.front_end(board)


stage.perform(main=main, core=core)
