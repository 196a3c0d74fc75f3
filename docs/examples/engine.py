"""The smallest engine that Stallwatch understands: two phases, one counter, one queue.

    stallwatch serve --limit step=5s -- python docs/examples/engine.py

After 50 steps it hangs, so that you see what a report looks like.
"""

from __future__ import annotations

import threading
import time

from stallwatch import heartbeat

board = heartbeat.attach(role="worker", rank=0)  # a no-op board when nobody supervises us
lane = board.lane("main")

with lane.phase("load_weights", cls="start"):
    for _shard in range(4):
        lane.progress()  # side progress: a slow load is no stall
        time.sleep(0.1)
board.ready()

mark = lane.marker("step", "number")  # bound once; then integers only
for number in range(50):
    board.pending(50 - number)
    mark(number)
    lane.progress()  # one step of real work done
    time.sleep(0.02)

mark(50)
threading.Event().wait()  # the hang
