"""K12, the other form: the reader waits for an end of file that a detached helper holds back."""

# /// scenario
# kind = "FORK_OR_FD_INHERITANCE"
# culprit = "pid:*"
# action = "restart"
# limits = { default = "1500ms" }
# ///

from __future__ import annotations

import os
import subprocess
import sys

import stage

from stallwatch import heartbeat


def read_to_the_end(end: int) -> None:
    while os.read(end, 4096):
        pass


def worker() -> None:
    board = heartbeat.attach(role="worker", rank=0)
    lane = board.lane("model")
    board.ready()
    stage.up()
    for step in stage.steps():
        lane.enter("execute_model", step=step)
        lane.progress(1)
    reader, writer = os.pipe()
    helper = [sys.executable, "-c", "import time; time.sleep(3600)"]
    subprocess.Popen(helper, pass_fds=(writer,), start_new_session=True)
    os.close(writer)
    lane.enter("collect_output")
    read_to_the_end(reader)


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("worker")
    stage.front_end(board)


stage.perform(main=main, worker=worker)
