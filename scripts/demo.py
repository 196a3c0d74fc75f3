"""The whole product in two minutes: a live engine, load, one injected stall, recovery.

Run it through `make demo` (the embedded engine) or `make demo-vllm` (vLLM 0.32 on CPU). Everything it
makes lies in .demo/ and everything it starts is stopped.
Exit status 0 only if each of detection, evidence, FAILURE and recovery was really seen.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / ".demo"
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
STALLWATCH = Path(sys.executable).with_name("stallwatch")
START_S = 300.0
SHOWN = 30  # lines of the report


def say(text: str) -> None:
    print(text, flush=True)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def get(port: int, path: str, timeout: float = 5.0) -> tuple[int, bytes]:
    """One GET on loopback; status 0 when nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def engine_view(port: int) -> dict[str, Any]:
    status, body = get(port, "/v1/engines/engine")
    return json.loads(body) if status == 200 else {}


class Load:
    """A few clients that ask for completions until told to stop; keeps counts and failures."""

    def __init__(self, port: int, clients: int = 4) -> None:
        self.served = 0
        self.failures: list[tuple[float, int, str]] = []
        self._port = port
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(clients)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(20)

    def _run(self) -> None:
        body = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 64})
        while not self._stop.is_set():
            status, text = self._ask(body)
            with self._lock:
                if status == 200:
                    self.served += 1
                elif status:
                    self.failures.append((time.monotonic(), status, text))
            if status != 200:
                self._stop.wait(0.5)

    def _ask(self, body: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        try:
            connection.request(
                "POST", "/v1/completions", body, {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            return response.status, response.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            return 0, str(error)
        finally:
            connection.close()


@dataclass(frozen=True)
class Engine:
    """What stands under the supervisor: its command (checkpoint and port are put in), its surroundings."""

    name: str
    make_checkpoint: tuple[str, ...]
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


EMBEDDED = Engine(
    name="the engine",
    make_checkpoint=(str(STALLWATCH), "engine", "make-tiny", "{model}"),
    command=(
        str(STALLWATCH), "engine", "serve", "--model", "{model}", "--served-name", "tiny",
        "--port", "{port}", "--ple-backend", "process",
    ),
)  # fmt: skip
VLLM = Engine(
    name="vLLM",
    make_checkpoint=(str(VLLM_PYTHON), "-m", "stallwatch_engine.tiny_vllm", "{model}"),
    command=(
        str(VLLM_PYTHON), "-m", "vllm.entrypoints.launchers.api_server.entry",
        "--model", "{model}", "--served-model-name", "tiny", "--host", "127.0.0.1",
        "--port", "{port}", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "8",
    ),
    environment={
        "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    },
)  # fmt: skip


def make_checkpoint(engine: Engine) -> Path:
    model = DEMO / ("tiny-vllm" if engine is VLLM else "tiny")
    if not (model / "config.json").exists():
        say(f"making a tiny random checkpoint in {model.relative_to(ROOT)} ...")
        subprocess.run(
            [part.format(model=model) for part in engine.make_checkpoint],
            check=True,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(ROOT / "engine")},
        )
    return model


@contextlib.contextmanager
def daemon(
    engine: Engine, model: Path, port: int, control: int
) -> Iterator[subprocess.Popen[bytes]]:
    """`stallwatch serve` in front of the engine; stopped, and if need be killed, on the way out."""
    command = [
        str(STALLWATCH), "serve", "--control", f"127.0.0.1:{control}",
        "--state-dir", str(DEMO / "state"), "--",
        *(part.format(model=model, port=port) for part in engine.command),
    ]  # fmt: skip
    say("$ " + " ".join(c.replace(str(ROOT) + "/", "") for c in command))
    env = {**os.environ, "OMP_NUM_THREADS": "1", **engine.environment}
    with (DEMO / "stallwatch.log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log, stdout=log, env=env)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def wait_ready(process: subprocess.Popen[bytes], control: int, incarnation: int) -> float:
    """Print each new start phase until the engine is READY; returns the seconds it took."""
    began, last = time.monotonic(), ""
    while time.monotonic() - began < START_S:
        if process.poll() is not None:
            raise SystemExit(
                f"the daemon ended with {process.returncode}: see .demo/stallwatch.log"
            )
        view = engine_view(control)
        if view.get("state") == "ready" and view["incarnation"] >= incarnation:
            return time.monotonic() - began
        lanes = [
            f"{x['address']} {x['phase']}" for x in view.get("lanes", ()) if x["cls"] == "start"
        ]
        state = view.get("state", "starting")
        what = ", ".join(lanes) or (view.get("reason", "") if state == "starting" else "")
        now = f"  {state}: {what}" if what else f"  {state}"
        if now != last:
            say(now)
            last = now
        time.sleep(0.5)
    raise SystemExit("not ready in time: see .demo/stallwatch.log")


def worker_pid(control: int) -> int:
    return next(
        int(p["pid"]) for p in engine_view(control)["processes"] if p["address"] == "worker:0"
    )


def wait_stall(control: int, port: int, known: set[str]) -> tuple[dict[str, Any], int]:
    """The new entry in the ledger, and what the engine's own /health said until then."""
    deadline, theirs = time.monotonic() + 60, 0
    while time.monotonic() < deadline:
        asked = get(port, "/health", timeout=0.5)[0]
        theirs = asked if asked in (0, 200) else theirs  # 503: our verdict has reached it
        _, body = get(control, "/v1/stalls")
        for item in json.loads(body or b'{"items": []}')["items"]:
            if item["id"] not in known:
                return dict(item), theirs
        time.sleep(0.02)
    raise SystemExit("no stall was reported: see .demo/stallwatch.log")


def main(argv: list[str]) -> int:
    engine = VLLM if "--vllm" in argv else EMBEDDED
    if engine is VLLM and not VLLM_PYTHON.exists():
        raise SystemExit("no .venv-vllm here: run `make demo-vllm`, which installs it")
    DEMO.mkdir(exist_ok=True)
    # Each demo begins anew: the restart budget outlives a daemon, and the sixth would find it spent.
    shutil.rmtree(DEMO / "state", ignore_errors=True)
    model, port, control = make_checkpoint(engine), free_port(), free_port()
    with daemon(engine, model, port, control) as process:
        took = wait_ready(process, control, 1)
        first = int(engine_view(control)["incarnation"])
        say(f"READY after {took:.0f} s. Four clients now ask for completions.")
        with Load(port) as load:
            while load.served < 20:
                time.sleep(0.1)
            known = {i["id"] for i in json.loads(get(control, "/v1/stalls")[1])["items"]}
            victim, before = worker_pid(control), load.served
            say(f"{before} requests served. Stopping the worker, pid {victim}, with SIGSTOP ...")
            os.kill(victim, signal.SIGSTOP)
            stopped = time.monotonic()
            stall, theirs = wait_stall(control, port, known)
            say(
                f"\nDETECTED after {time.monotonic() - stopped:.1f} s: {stall['kind']} in {stall['culprit']}"
            )
            ours = get(control, "/healthz")[0]
            say(
                f"until then {engine.name}'s own /health said {theirs}; our /healthz now says {ours}"
            )
            deadline = time.monotonic() + 10
            while not load.failures and time.monotonic() < deadline:
                time.sleep(0.02)
            if not load.failures:
                raise SystemExit("no client was answered")
            when, status, body = load.failures[0]
            say(
                f"FAILURE to the waiting clients after {when - stopped:.1f} s: HTTP {status}\n  {body}"
            )
            say("\nthe engine is started again ...")
            took = wait_ready(process, control, first + 1)
            served, deadline = load.served, time.monotonic() + 60
            while load.served == served and time.monotonic() < deadline:
                time.sleep(0.1)
            if load.served == served:
                raise SystemExit("the new incarnation serves nothing")
            say(f"RECOVERED: incarnation {first + 1} is READY after {took:.0f} s and serves.")
        say(f"\n$ stallwatch show {stall['id']}")
        shown = subprocess.run(
            [str(STALLWATCH), "--url", f"http://127.0.0.1:{control}", "show", stall["id"]],
            capture_output=True, text=True, check=True, timeout=30,
        )  # fmt: skip
        lines = shown.stdout.splitlines()
        say("\n".join(lines[:SHOWN]))
        if len(lines) > SHOWN:
            say(f"... {len(lines) - SHOWN} more lines: stacks, log, what was done, what to do next")
    say("\nstopped. Read on:")
    say(f"  stallwatch show --state-dir .demo/state {stall['id']}")
    say("  .demo/stallwatch.log is the daemon's log with the engine's output")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        say("interrupted: everything that was started is stopped")
        sys.exit(130)
