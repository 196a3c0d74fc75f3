"""F9: the engine ends with status 0 and nobody asked it to."""

# /// scenario
# kind = "CHILD_DIED"
# culprit = "api:0*"
# action = "restart"
# limits = { default = "1500ms" }
# ///

from __future__ import annotations

import sys

import stage

from stallwatch import heartbeat


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    lane = board.lane("loop")
    board.ready()
    for _ in stage.steps():
        lane.enter("loop")
    sys.exit(0)


stage.perform(main=main)
