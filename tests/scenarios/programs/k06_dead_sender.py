"""K06: three notifications are expected from another machine, it died after two."""

# /// scenario
# kind = "REMOTE_PEER_WAIT"
# culprit = "remote:127.0.0.1:*"
# action = "fail"
# limits = { default = "1500ms" }
# ///

from __future__ import annotations

import queue
import socket
import time

import stage

from stallwatch import heartbeat


def sender(port: str) -> None:
    """In the place of another machine: it sends two of three, and is no more."""
    with socket.create_connection(("127.0.0.1", int(port))) as sock:
        stage.up()
        sock.sendall(b"12")
        time.sleep(0.2)


def worker() -> None:
    board = heartbeat.attach(role="worker", rank=0)
    lane = board.lane("kv")
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    board.ready()
    stage.up()
    for step in stage.steps():
        lane.enter("decode", step=step)
        lane.progress(1)
    lane.wait("kv_load", on=f"remote:127.0.0.1:{port}")
    peer = stage.child("sender", port)
    stage.go()
    connection, _ = server.accept()
    connection.recv(2)
    peer.wait()
    queue.Queue().get()  # the third notification


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("worker")
    stage.front_end(board)


stage.perform(main=main, worker=worker, sender=sender)
