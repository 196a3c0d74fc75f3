"""F10: it dies a moment after each READY; a budget that every start resets would never end it."""

# /// scenario
# kind = "CHILD_DIED"
# culprit = "api:0*"
# action = "restart"
# state = "exhausted"
# limits = { default = "1500ms" }
# ///

from __future__ import annotations

import os
import time

import stage

from stallwatch import heartbeat


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    lane = board.lane("loop")
    board.ready()
    lane.idle()
    time.sleep(0.3)
    os._exit(1)


stage.perform(main=main)
