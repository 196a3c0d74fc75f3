"""Long runs, once per release: traffic without a verdict, then stall after stall without a leak.

    make soak                       # 10 minutes, 8 clients; 1,000 stalls
    python scripts/soak.py --minutes 2 --stalls 50

Exit status 1 when a verdict came during the traffic, when a stall was not confirmed, answered or
recovered from, or when the daemon's memory, descriptors or threads grew with the stalls.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "vllm")]

ENGINE = textwrap.dedent(
    """
    import ctypes, os, time
    from stallwatch import heartbeat
    board = heartbeat.attach(role="worker", rank=0)
    lane = board.lane("main")
    mark = lane.marker("execute_model", "step", limit=0.3)
    board.ready()
    for step in range(100):  # past the five steps after READY that may compile
        mark(step)
        lane.progress(1)
        time.sleep(0.01)
    mark(100)
    libc = ctypes.CDLL(None)
    semaphore = ctypes.create_string_buffer(64)
    libc.sem_init(semaphore, 0, 0)
    libc.sem_wait(semaphore)
    """
)


class Traffic:
    """Clients that ask, streaming and not, long and short, until stopped."""

    def __init__(self, port: int, clients: int) -> None:
        self.served = 0
        self.errors: list[str] = []
        self._port = port
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(clients)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)

    def _run(self, number: int) -> None:
        turn = 0
        while not self._stop.is_set():
            turn += 1
            tokens = (8, 64, 256, 1024)[(number + turn) % 4]
            error = self._ask(tokens, stream=bool((number + turn) % 2))
            with self._lock:
                if error:
                    self.errors.append(error)
                else:
                    self.served += 1

    def _ask(self, tokens: int, *, stream: bool) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        body = {
            "model": "tiny",
            "prompt": "hello " * tokens,
            "max_tokens": tokens,
            "stream": stream,
        }
        body["prompt"] = "hello " * min(64, tokens)
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            text = response.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            return repr(error)
        finally:
            connection.close()
        bad = response.status != 200 or '"error"' in text or (stream and "[DONE]" not in text)
        return f"{response.status}: {text[-200:]}" if bad else ""


def traffic(minutes: float) -> bool:
    """Saturate a vLLM with 8 clients; True when no verdict and no error came of it."""
    from supervised import Supervised  # noqa: PLC0415 - needs the vLLM environment

    with tempfile.TemporaryDirectory(prefix="stallwatch-soak-") as folder:
        (Path(folder) / "run").mkdir()
        chat = Supervised(Path(folder) / "run", limits={})  # the limits that users get
        try:
            chat.wait_ready()
            load = Traffic(chat.port, 8)
            end = time.monotonic() + minutes * 60
            while time.monotonic() < end:
                time.sleep(min(10.0, max(0.1, end - time.monotonic())))
                left = max(0, round(end - time.monotonic()))
                print(f"  {left:5d} s left: {load.served} served, {len(load.errors)} errors, "
                      f"{len(chat.stalls())} verdicts", file=sys.stderr, flush=True)  # fmt: skip
            load.stop()
            stalls, withdrawn = (
                chat.stalls(),
                chat.metric('stallwatch_stalls_withdrawn_total{engine="chat"}'),
            )
            late = chat.metric("stallwatch_judge_looks_late_total")
            looks = chat.metric("stallwatch_judge_looks_total")
            print(json.dumps({
                "minutes": minutes, "clients": 8, "served": load.served, "errors": load.errors[:5],
                "verdicts": [s["kind"] for s in stalls], "withdrawn": withdrawn,
                "looks": looks, "looks_late": late,
            }))  # fmt: skip
            return not stalls and not load.errors and load.served > 0
        finally:
            chat.end()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def get(port: int, path: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def figures(daemon: psutil.Process) -> dict[str, float]:
    return {
        "rss_mib": daemon.memory_info().rss / 2**20,
        "fds": daemon.num_fds(),
        "threads": daemon.num_threads(),
    }


def stalls(count: int) -> bool:
    """Stall after stall of a small engine; True when each was dealt with and nothing grew."""
    with tempfile.TemporaryDirectory(prefix="stallwatch-soak-") as name:
        folder, control = Path(name), free_port()
        (folder / "engine.py").write_text(ENGINE)
        (folder / "stallwatch.toml").write_text(
            f"""
[supervisor]
control = "127.0.0.1:{control}"
state_dir = {json.dumps(str(folder / "state"))}
[engines.small]
command = {json.dumps([sys.executable, str(folder / "engine.py")])}
logs = "file"
[engines.small.restart]
budget = 1000
backoff = ["0ms"]
"""
        )
        log = (folder / "log").open("wb")
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name("stallwatch")), "serve", "-c", str(folder / "stallwatch.toml")],
            stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": str(ROOT / "supervisor")},
        )  # fmt: skip
        daemon = psutil.Process(process.pid)
        seen: dict[str, dict[str, Any]] = {}
        early: dict[str, float] = {}
        try:
            end = time.monotonic() + 60 + count * 8
            while len(seen) < count and time.monotonic() < end and process.poll() is None:
                time.sleep(0.5)
                try:
                    items = get(control, "/v1/stalls")["items"]
                except (OSError, ValueError):
                    continue
                before = len(seen) // 25
                seen |= {
                    i["id"]: get(control, f"/v1/stalls/{i['id']}")
                    for i in items
                    if i["id"] not in seen
                }
                if len(seen) >= min(50, count // 4) and not early:
                    early = figures(daemon)
                if len(seen) // 25 != before:
                    print(
                        f"  {len(seen)} of {count} stalls: {figures(daemon)}",
                        file=sys.stderr,
                        flush=True,
                    )
            late = figures(daemon)
            boards = [n for n in os.listdir("/dev/shm") if n.startswith("stallwatch-small")]
        finally:
            process.terminate()
            process.wait(60)
            log.close()
        kinds = {
            k: sum(i["kind"] == k for i in seen.values())
            for k in {i["kind"] for i in seen.values()}
        }
        over = [i["elapsed_s"] - i["limit_s"] for i in seen.values()]
        print(json.dumps({
            "stalls": len(seen), "kinds": kinds, "early": early, "late": late, "boards": len(boards),
            "confirmed_after_limit_s": {
                "p50": round(statistics.median(over), 3), "max": round(max(over), 3),
            } if over else {},
        }))  # fmt: skip
        grew = bool(early) and (
            late["fds"] > early["fds"] + 16
            or late["threads"] > early["threads"] + 8
            or late["rss_mib"] > early["rss_mib"] * 1.3 + 10
        )
        return len(seen) >= count and not grew and len(boards) <= 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="of traffic (0: none)")
    parser.add_argument("--stalls", type=int, default=1000, help="stalls in a row (0: none)")
    args = parser.parse_args()
    good = True
    if args.minutes > 0:
        print(f"traffic for {args.minutes:g} min", file=sys.stderr)
        good = traffic(args.minutes) and good
    if args.stalls > 0:
        print(f"{args.stalls} stalls", file=sys.stderr)
        good = stalls(args.stalls) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
