"""K01, other names: four ranks sleep in one and the same call, none is odd."""

# /// scenario
# kind = "DEVICE_WAIT"
# culprit = "worker:?/fwd"
# action = "restart"
# limits = { default = "1500ms" }
# slow = true
# ///

from __future__ import annotations

import stage

from stallwatch import heartbeat


def replay_graph() -> None:
    stage.block_in_c()


def worker(rank: str) -> None:
    board = heartbeat.attach(role="worker", rank=int(rank))
    lane = board.lane("fwd")
    board.ready()
    stage.up()
    for _ in range(20):
        lane.enter("decode")
        lane.progress(1)
        stage.time.sleep(stage.TICK_S)
    lane.enter("decode")
    replay_graph()


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    for rank in range(4):
        stage.child("worker", rank)
    stage.front_end(board)


stage.perform(main=main, worker=worker)
