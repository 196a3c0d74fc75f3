"""K13 at the start, found by the look into compilers' caches: nobody says which file it is."""

# /// scenario
# kind = "STALE_LOCK_FILE"
# culprit = "worker:0/loader"
# action = "fail"
# limits = { default = "1500ms", load_jit = "2s" }
# cache = "lock"
# ///

from __future__ import annotations

import os
import time

import stage

from stallwatch import heartbeat


class FileBaton:
    """As build tools have it: whoever made the file builds, the others poll until it is gone."""

    def __init__(self, path: str) -> None:
        self.path = path

    def wait(self) -> None:
        while os.path.exists(self.path):
            time.sleep(0.05)


def wait_baton(path: str) -> None:
    FileBaton(path).wait()


def worker() -> None:
    board = heartbeat.attach(role="worker", rank=0)
    lane = board.lane("loader")
    stage.up()
    lane.enter("load_jit", cls="start", limit=2.0)
    wait_baton(os.path.join(os.environ["TORCH_EXTENSIONS_DIR"], "lock"))


def main() -> None:
    board = heartbeat.attach(role="api", rank=0)
    stage.child("worker")
    stage.front_end(board)


stage.perform(main=main, worker=worker)
