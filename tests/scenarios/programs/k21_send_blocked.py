"""K21 on a socket: the output thread hands results over, and nobody takes them; core and worker idle."""

# /// scenario
# kind = "OUTPUT_BLOCKED"
# culprit = "core:0/output"
# action = "restart"
# limits = { default = "1500ms" }
# ///

from __future__ import annotations

import queue
import socket
import threading

import stage

from stallwatch import heartbeat


def send_outputs(sock: socket.socket) -> None:
    while True:
        sock.sendall(b"x" * 65536)


def writes(board: object) -> None:
    lane = board.lane("output")
    lane.idle()
    stage.time.sleep(0.5)
    mine, _theirs = socket.socketpair()
    lane.enter("out_send")
    send_outputs(mine)


def core() -> None:
    board = heartbeat.attach(role="core", rank=0)
    lane = board.lane("main")
    threading.Thread(target=writes, args=(board,), daemon=True, name="output").start()
    board.ready()
    stage.up()
    for step in stage.steps():
        lane.enter("step", step=step)
        lane.progress(1)
    lane.idle()
    queue.Queue().get()


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("core")
    stage.front_end(board)


stage.perform(main=main, core=core)
