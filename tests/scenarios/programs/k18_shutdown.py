"""K18: asked to stop, the process sits in a C mutex, and its Python signal handler never runs."""

# /// scenario
# kind = "SHUTDOWN_HANG"
# culprit = "api:0*"
# action = "restart"
# do = "stop"
# limits = { default = "1500ms" }
# ///

from __future__ import annotations

import queue
import signal

import stage

from stallwatch import heartbeat


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    lane = board.lane("main")
    signal.signal(signal.SIGTERM, lambda *_: queue.Queue().put(0))
    board.ready()
    for step in stage.steps():
        lane.enter("serve", step=step)
        lane.progress(1)
    lane.idle()
    stage.lock_in_c()


stage.perform(main=main)
