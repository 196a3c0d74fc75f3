"""K13: the lock file of a compiler that was killed is still there, and its waiter polls for ever."""

# /// scenario
# kind = "STALE_LOCK_FILE"
# culprit = "worker:0/model"
# action = "fail"
# limits = { default = "1500ms" }
# ///

from __future__ import annotations

import os
import subprocess
import sys
import time

import stage

from stallwatch import heartbeat


def wait_for_lock(path: str) -> None:
    while os.path.exists(path):
        time.sleep(0.1)


def worker() -> None:
    board = heartbeat.attach(role="worker", rank=0)
    lane = board.lane("model")
    board.ready()
    stage.up()
    for step in stage.steps():
        lane.enter("execute_model", step=step)
        lane.progress(1)
    path = os.path.join(stage.folder(), "build.lock")
    owner = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid()))"
    subprocess.run([sys.executable, "-c", owner, path], check=True)  # it ended, and left its file
    lane.enter("build_kernels", text=f"waiting for {path}")
    wait_for_lock(path)


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("worker")
    stage.front_end(board)


stage.perform(main=main, worker=worker)
