"""K12 through multiprocessing: the forked writer logs, and the logging lock was held elsewhere."""

# /// scenario
# kind = "FORK_OR_FD_INHERITANCE"
# culprit = "pid:*"
# action = "restart"
# limits = { default = "1500ms" }
# ///

from __future__ import annotations

import multiprocessing
import threading
import time

import stage

from stallwatch import heartbeat

LOCK = threading.RLock()


def hold() -> None:
    with LOCK:
        time.sleep(3600)


def log_line() -> None:
    with LOCK:
        pass


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
    lane.enter("export")
    writer = multiprocessing.get_context("fork").Process(target=log_line)
    writer.start()
    writer.join()


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("worker")
    stage.front_end(board)


stage.perform(main=main, worker=worker)
