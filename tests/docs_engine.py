"""What the documentation's `vllm serve MODEL --port N` meets in its tests: an engine of two processes.

The api answers completions at once; the worker steps, or, with STUB_HANG set, hangs after a while in a
phase with a limit of its own. Without a supervisor it is a plain server.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from bench_server import Server
from stallwatch import heartbeat

TICK_S = 0.02
STEPS_BEFORE_HANG = 600  # some of them after READY: the first ones then have the compile limit


class Willing(Server):
    """Every prompt is answered in three tokens."""

    async def _answer(self, prompt, body, reader, writer) -> bool:  # type: ignore[no-untyped-def]
        return await super()._answer("ok", body, reader, writer)


def worker() -> None:
    """One lane that steps."""
    board = heartbeat.attach(role="worker", rank=0)
    lane = board.lane("model")
    board.ready()
    for step in range(sys.maxsize):
        lane.enter("execute_model", step=step)
        lane.progress(1)
        lane.idle()
        if os.environ.get("STUB_HANG") and step == STEPS_BEFORE_HANG:
            lane.enter("execute_model", limit=1.0, step=step + 1)
            threading.Event().wait()
        time.sleep(TICK_S / 4)


async def api(port: int, child: subprocess.Popen[bytes]) -> None:
    """The front end, as long as its worker lives. Its loop beats."""
    board = heartbeat.attach(role="api", rank=0)
    lane = board.lane("loop")
    server = Willing()
    listener = await asyncio.start_server(server._serve, "127.0.0.1", port, limit=1 << 24)
    board.ready()
    while child.poll() is None:
        lane.enter("loop")
        await asyncio.sleep(TICK_S)
    listener.close()


def main(argv: Sequence[str]) -> None:
    if argv == ["worker"]:
        worker()
        return
    child = subprocess.Popen([sys.executable, os.path.abspath(__file__), "worker"])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        asyncio.run(api(int(argv[argv.index("--port") + 1]), child))
    finally:
        child.kill()
        child.wait()


if __name__ == "__main__":
    main(sys.argv[1:])
