"""K03: three stages in a ring, each receives before it sends."""

# /// scenario
# kind = "ORDER_CYCLE"
# culprit = "worker:?/pipe"
# action = "restart"
# edges = [["worker:0/pipe", "worker:2/pipe"], ["worker:1/pipe", "worker:0/pipe"], ["worker:2/pipe", "worker:1/pipe"]]
# limits = { default = "1500ms" }
# ///

from __future__ import annotations

import os

import stage

from stallwatch import heartbeat


def recv(end: int) -> None:
    os.read(end, 1)


def worker(rank: str, reads: str, writes: str) -> None:
    board = heartbeat.attach(role="worker", rank=int(rank))
    lane = board.lane("pipe")
    board.ready()
    stage.up()
    for step in stage.steps():
        lane.enter("forward", step=step)
        lane.progress(1)
    lane.wait("recv", on=f"worker:{(int(rank) - 1) % 3}/pipe")
    recv(int(reads))
    os.write(int(writes), b"x")


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    pipes = [os.pipe() for _ in range(3)]
    for rank in range(3):
        ends = (pipes[rank][0], pipes[(rank + 1) % 3][1])
        stage.child("worker", rank, *ends, pass_fds=ends)
    stage.front_end(board)


stage.perform(main=main, worker=worker)
