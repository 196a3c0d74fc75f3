"""F12: a debugger holds the worker stopped for longer than any limit."""

# /// scenario
# kind = ""
# limits = { default = "1s", no_progress = "1s" }
# watch = 5
# ///

from __future__ import annotations

import ctypes
import time

import stage

from stallwatch import heartbeat

PTRACE_SEIZE, PTRACE_INTERRUPT = 0x4206, 0x4207


def debugger(pid: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    nothing = ctypes.c_void_p()
    if libc.ptrace(PTRACE_SEIZE, int(pid), nothing, nothing) != 0:
        raise OSError(ctypes.get_errno(), "ptrace")
    libc.ptrace(PTRACE_INTERRUPT, int(pid), nothing, nothing)
    stage.up()
    time.sleep(3600)


def worker() -> None:
    board = heartbeat.attach(role="worker", rank=0)
    lane = board.lane("model")
    board.ready()
    stage.up()
    while True:
        lane.enter("execute_model")
        time.sleep(stage.TICK_S)
        lane.progress(1)


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    process = stage.child("worker")
    time.sleep(0.5)
    stage.child("debugger", process.pid)
    stage.front_end(board)


stage.perform(main=main, worker=worker, debugger=debugger)
