"""What the gateway costs: direct, through the gateway, through nginx, side by side in one run.

    python tests/bench/bench_gateway.py [--quick] [--json FILE]

One server streams events of one token each, as fast as they are taken, to 1, 32 and 256 streams; one
client counts them. CPU time per event is taken with 64 streams of 100 events a second each, where
no two events come in one read. Between the two is nothing, our gateway, or nginx as a plain unbuffered proxy
with one worker. Rounds alternate, so that load of the machine hits all three alike; what is
reported are ratios of medians. Server and client are processes of their own: on a machine with few
cores they compete with the relay, and the ratio to direct says more about them than about it;
the ratio to nginx and the CPU time per event are the relay's own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

PACED, PACE_S = 64, 0.01  # streams and seconds between their events, for CPU time per event
HERE = Path(__file__).resolve()
REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: %d\r\n\r\n%b"
EVENT = (
    b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":'
    b'[{"index":0,"delta":{"content":"tok"},"finish_reason":null}]}\n\n'
)
DONE = b"data: [DONE]\n\n"
HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
NGINX = """
worker_processes 1;
daemon off;
pid {folder}/pid;
error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off;
  client_body_temp_path {folder}/a; proxy_temp_path {folder}/b; fastcgi_temp_path {folder}/c;
  uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e;
  upstream engine {{ server 127.0.0.1:{upstream}; keepalive 256; }}
  server {{
    listen 127.0.0.1:{port} backlog=2048;
    location / {{
      proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_request_buffering off; proxy_read_timeout 300s;
    }}
  }}
}}
"""


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Server(asyncio.Protocol):
    """Answers `n` in the body with n events; one write for each, with backpressure."""

    def connection_made(self, transport):
        self.transport = transport
        self.may = asyncio.Event()
        self.may.set()
        self.data = b""

    def pause_writing(self):
        self.may.clear()

    def resume_writing(self):
        self.may.set()

    def data_received(self, data):
        self.data += data
        head, end, body = self.data.partition(b"\r\n\r\n")
        size = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0]) if end else 0
        if end and len(body) >= size:
            self.data = b""
            asked = json.loads(body)
            self.task = asyncio.ensure_future(self.answer(asked["n"], asked["pace"]))

    async def answer(self, count, pace):
        self.transport.write(HEAD)
        event = chunk(EVENT)
        for _ in range(count):
            await self.may.wait()
            self.transport.write(event)
            await asyncio.sleep(pace)  # each event is a write of its own, as an engine's are
        self.transport.write(chunk(DONE) + b"0\r\n\r\n")


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", port, backlog=2048)
    await server.serve_forever()


async def supervise(port: int, upstream: int) -> None:
    """The gateway with a supervisor that always says ready: the relay alone is measured."""
    from stallwatch.gateway.gateway import Gateway
    from stallwatch.gateway.options import Options
    from stallwatch.gateway.replica import View
    from stallwatch.gateway.watch import TICK_S, Watch

    gateway = Gateway(Options())
    watch = Watch(gateway)
    view = View("ready", ready=True, incarnation=1)
    gateway.router.learn({"engine": (f"127.0.0.1:{upstream}", view)})
    loop = asyncio.get_running_loop()
    await loop.create_server(gateway.connection, "127.0.0.1", port, backlog=2048)
    while True:
        watch.turn()
        await asyncio.sleep(TICK_S)


class Client(asyncio.Protocol):
    """One keep-alive connection that counts bytes until the end of each stream."""

    def connection_made(self, transport):
        self.transport = transport
        self.first_s = 0.0
        self.tail = b""

    def ask(self, count, pace=0.0):
        body = json.dumps({"n": count, "pace": pace, "stream": True}).encode()
        self.over = asyncio.get_running_loop().create_future()
        self.tail, self.first_s = b"", 0.0
        self.began_s = time.perf_counter()
        self.transport.write(REQUEST % (len(body), body))
        return self.over

    def data_received(self, data):
        if not self.first_s:
            self.first_s = time.perf_counter() - self.began_s
        self.tail = (self.tail + data)[-32:]
        if self.tail.endswith(b"0\r\n\r\n") and not self.over.done():
            self.over.set_result(None)

    def connection_lost(self, exc):
        if hasattr(self, "over") and not self.over.done():
            self.over.set_exception(ConnectionError(str(exc)))


async def load(port: int, streams: int, events: int, pace: float = 0.0) -> float:
    """Events per second over so many streams."""
    loop = asyncio.get_running_loop()
    clients = [(await loop.create_connection(Client, "127.0.0.1", port))[1] for _ in range(streams)]
    each = max(1, events // streams)
    began = time.perf_counter()
    await asyncio.gather(*(client.ask(each, pace) for client in clients))
    took = time.perf_counter() - began
    for client in clients:
        client.transport.close()
    return each * streams / took


async def first_bytes(port: int, count: int) -> list[float]:
    """Seconds to the first byte of requests one after another on one connection."""
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(Client, "127.0.0.1", port)
    found = []
    for _ in range(count):
        await client.ask(1)
        found.append(client.first_s)
    client.transport.close()
    return found


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def wait_port(port: int) -> None:
    end = time.monotonic() + 15
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.02)
    raise SystemExit(f"nothing listens on {port}")


def cpu_s(process: psutil.Process) -> float:
    """User and system time of a process and its children."""
    parts = [process, *process.children(recursive=True)]
    return sum(p.cpu_times().user + p.cpu_times().system for p in parts)


def run(options: argparse.Namespace) -> dict:
    events = 6_000 if options.quick else 60_000
    rounds = 3 if options.quick else 7
    asks = 100 if options.quick else 600
    streams = (1, 32, 256)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        ports = {"direct": free_port(), "gateway": free_port(), "nginx": free_port()}
        python = [sys.executable, str(HERE)]
        commands = {
            "direct": [*python, "--serve", str(ports["direct"])],
            "gateway": [*python, "--relay", f"{ports['gateway']}:{ports['direct']}"],
        }
        nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
        if nginx:
            config = Path(folder, "nginx.conf")
            config.write_text(
                NGINX.format(folder=folder, port=ports["nginx"], upstream=ports["direct"])
            )
            commands["nginx"] = [nginx, "-c", str(config), "-e", f"{folder}/error.log"]
        else:
            print("nginx is not installed: its column is left out (apt-get install nginx-light)")
        processes = {}
        for name, command in commands.items():
            child = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
            stack.callback(child.wait, 10)
            stack.callback(child.terminate)
            processes[name] = psutil.Process(child.pid)
            wait_port(ports[name])
        found: dict = {name: {"ttfb": [], "cpu": []} for name in commands}
        for name in commands:
            asyncio.run(first_bytes(ports[name], 20))  # warm
        for turn in range(rounds):
            order = list(commands) if turn % 2 == 0 else list(reversed(commands))
            for name in order:
                found[name]["ttfb"] += asyncio.run(first_bytes(ports[name], asks // rounds))
            for count in streams:
                for name in order:
                    rate = asyncio.run(load(ports[name], count, events))
                    found[name].setdefault(count, []).append(rate)
            for name in [n for n in order if n != "direct"]:
                before = cpu_s(processes[name])
                asyncio.run(load(ports[name], PACED, events, PACE_S))
                found[name]["cpu"].append((cpu_s(processes[name]) - before) / events * 1e6)
    return summary(found, streams)


def summary(found: dict, streams: tuple[int, ...]) -> dict:
    def at(values: list[float], share: float) -> float:
        ordered = sorted(values)
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))]

    out: dict = {}
    for name, values in found.items():
        out[name] = {
            "ttfb_p50_ms": at(values["ttfb"], 0.5) * 1e3,
            "ttfb_p99_ms": at(values["ttfb"], 0.99) * 1e3,
            **{f"events_per_s_{n}": statistics.median(values[n]) for n in streams},
        }
        if values["cpu"]:
            out[name]["cpu_s_per_million_events"] = statistics.median(values["cpu"])
    direct, gateway = out["direct"], out["gateway"]
    ratios = {
        "added_ttfb_p50_ms": gateway["ttfb_p50_ms"] - direct["ttfb_p50_ms"],
        "added_ttfb_p99_ms": gateway["ttfb_p99_ms"] - direct["ttfb_p99_ms"],
    }
    if "nginx" in out:
        for n in streams:
            key = f"events_per_s_{n}"
            ratios[f"of_nginx_{n}"] = gateway[key] / out["nginx"][key]
        ratios["cpu_of_nginx"] = (
            gateway["cpu_s_per_million_events"] / out["nginx"]["cpu_s_per_million_events"]
        )
    return {"figures": out, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--relay", help=argparse.SUPPRESS)
    options = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        if options.serve:
            asyncio.run(serve(options.serve))
            return
        if options.relay:
            from stallwatch.gateway.main import loop_factory

            port, _, upstream = options.relay.partition(":")
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                runner.run(supervise(int(port), int(upstream)))
            return
    found = run(options)
    for name, values in found["figures"].items():
        print(name.ljust(8), "  ".join(f"{k} {v:.2f}" for k, v in values.items()))
    print("ratios  ", "  ".join(f"{k} {v:.2f}" for k, v in found["ratios"].items()))
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
