"""K12: os.fork() while another thread holds a lock; the child takes it and waits for nobody."""

# /// scenario
# kind = "FORK_OR_FD_INHERITANCE"
# culprit = "pid:*"
# action = "restart"
# limits = { default = "1500ms" }
# ///

from __future__ import annotations

import os
import threading
import time

import stage

from stallwatch import heartbeat

LOCK = threading.Lock()


def hold() -> None:
    with LOCK:
        time.sleep(3600)


def write_shard() -> None:
    with LOCK:
        pass


def save_checkpoint() -> None:
    pid = os.fork()
    if pid == 0:
        write_shard()
        os._exit(0)
    os.waitpid(pid, 0)


def worker() -> None:
    board = heartbeat.attach(role="worker", rank=0)
    lane = board.lane("model")
    board.ready()
    stage.up()
    for step in stage.steps():
        lane.enter("execute_model", step=step)
        lane.progress(1)
    threading.Thread(target=hold, daemon=True).start()
    time.sleep(0.1)
    lane.enter("save_checkpoint")
    save_checkpoint()


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("worker")
    stage.front_end(board)


stage.perform(main=main, worker=worker)
