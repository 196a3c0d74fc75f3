"""What the whole daemon costs: CPU and memory at 64 processes x 4 lanes that beat ten times a second.

    python tests/bench/bench_supervisor.py [--json] [--seconds 20] [--processes 64]

CPU is the daemon's own user + system time over the window, as a share of one core, best of three
windows (the machine may be shared). Exit status 1 when a bar is missed: 2 % of a core, 100 MB.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil

BAR_CPU, BAR_MB = 0.02, 100.0
ROOT = Path(__file__).resolve().parents[2]

ENGINE = textwrap.dedent(
    """
    import os, sys, time
    from stallwatch import heartbeat

    def live(rank):
        board = heartbeat.attach(role="worker", rank=rank)
        lanes = [board.lane("main")] + [board.channel(f"stream/{n}") for n in range(3)]
        marks = [lane.marker("execute_model", "step", limit=60.0) for lane in lanes]
        board.ready()
        step = 0
        while True:
            step += 1
            for mark, lane in zip(marks, lanes):
                mark(step)
                lane.progress(1)
            time.sleep(0.1)

    for rank in range(1, int(sys.argv[1])):
        if os.fork() == 0:
            live(rank)
    live(0)
    """
)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def lanes(port: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/v1/engines/big")
        body = json.loads(connection.getresponse().read())
    except (OSError, ValueError):
        return 0
    finally:
        connection.close()
    return len(body.get("lanes", ())) if body.get("state") == "ready" else 0


def measure(seconds: float, processes: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="stallwatch-bench-") as name:
        folder, port = Path(name), free_port()
        (folder / "engine.py").write_text(ENGINE)
        command = [
            *(str(Path(sys.executable).with_name("stallwatch")), "serve", "--name", "big"),
            *("--control", f"127.0.0.1:{port}", "--state-dir", str(folder / "state"), "--"),
            *(sys.executable, str(folder / "engine.py"), str(processes)),
        ]
        with (folder / "log").open("wb") as log:
            daemon = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(ROOT / "supervisor")},
            )
        try:
            deadline = time.monotonic() + 60
            while lanes(port) < processes * 4 and time.monotonic() < deadline:
                time.sleep(0.5)
            found = lanes(port)
            process, shares = psutil.Process(daemon.pid), []
            for _ in range(3):
                before, began = sum(process.cpu_times()[:2]), time.monotonic()
                time.sleep(seconds)
                shares.append((sum(process.cpu_times()[:2]) - before) / (time.monotonic() - began))
            return {
                "lanes": found,
                "cpu_share": min(shares),
                "cpu_share_worst": max(shares),
                "rss_mb": process.memory_info().rss / 1e6,
                "threads": process.num_threads(),
                "load": os.getloadavg()[0],
            }
        finally:
            daemon.terminate()
            daemon.wait(60)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--processes", type=int, default=64)
    args = parser.parse_args()
    found = measure(args.seconds, args.processes)
    good = (
        found["lanes"] == args.processes * 4
        and found["cpu_share"] <= BAR_CPU
        and found["rss_mb"] <= BAR_MB
    )
    if args.json:
        print(json.dumps({**found, "good": good}))
    else:
        print(
            f"{found['lanes']:.0f} lanes: {found['cpu_share']:.2%} of a core (bar {BAR_CPU:.0%}), "
            f"{found['rss_mb']:.0f} MB (bar {BAR_MB:.0f}), {found['threads']:.0f} threads, "
            f"load {found['load']:.1f}"
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
