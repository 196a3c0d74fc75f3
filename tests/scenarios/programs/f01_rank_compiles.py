"""F1 among ranks: one compiles a new shape in serving, the others stand in the collective and wait for it."""

# /// scenario
# kind = ""
# limits = { default = "2s", no_progress = "2s", compile = "30s" }
# watch = 8
# slow = true
# ///

from __future__ import annotations

import subprocess
import sys

import stage

from stallwatch import heartbeat

RANKS = 3
BURN = """import sys, time; t = time.monotonic()
while time.monotonic() - t < 5: pass"""


def worker(rank: str, folder: str) -> None:
    board = heartbeat.attach(role="worker", rank=int(rank))
    lane = board.lane("model")
    barrier = stage.Barrier(folder, RANKS)
    board.ready()
    stage.up()
    for step in range(1_000_000):
        lane.enter("forward", step=step)
        if step == 30 and rank == "0":
            subprocess.run([sys.executable, "-c", BURN], check=False)
        barrier.wait()
        lane.progress(1)
        stage.time.sleep(stage.TICK_S)


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    folder = stage.folder()
    for rank in range(RANKS):
        stage.child("worker", rank, folder)
    stage.front_end(board)


stage.perform(main=main, worker=worker)
