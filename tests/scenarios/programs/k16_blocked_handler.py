"""K16: a handler sleeps on the event loop; the core behind it goes on."""

# /// scenario
# kind = "FRONTEND_BLOCKED"
# culprit = "api:0/loop"
# action = "restart"
# limits = { default = "1500ms", loop = "1500ms" }
# ///

from __future__ import annotations

import asyncio
import time

import stage

from stallwatch import heartbeat


def fetch_blocking() -> None:
    time.sleep(3600)


def core() -> None:
    board = heartbeat.attach(role="core", rank=0)
    lane = board.lane("main")
    board.ready()
    stage.up()
    while True:
        lane.enter("step")
        time.sleep(stage.TICK_S)
        lane.progress(1)
        lane.idle()


async def serve(board: object) -> None:
    lane = board.lane("loop")
    board.pending(2)
    board.ready()
    for turn in range(40):
        lane.enter("loop", turn=turn)
        await asyncio.sleep(stage.TICK_S)
    fetch_blocking()


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("core")
    stage.go()
    asyncio.run(serve(board))


stage.perform(main=main, core=core)
