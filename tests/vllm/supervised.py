"""A real vLLM under a real daemon, with clients that note when and how each request ended."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from faults import Faults
from running import PYTHON, free_port, write_model

STALLWATCH = Path(sys.executable).with_name("stallwatch")
START_S = 240.0

LIMITS: Mapping[str, str] = {
    "default": "6s",
    "execute_model": "4s",
    "sample_tokens": "4s",
    "out_copy": "4s",
    "loop": "4s",
    "compile": "90s",  # the first step of two ranks compiles C++ on a shared machine
    "no_progress": "15s",
    "start": "240s",
}


def until(condition: Callable[[], Any], *, seconds: float, what: str) -> Any:
    """The condition's first true value; AssertionError naming `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.02)  # a poll with a deadline
    raise AssertionError(f"not within {seconds} s: {what}")


@dataclass
class Client:
    """One request, in a thread. `status` 0: the connection ended without an answer."""

    port: int
    stream: bool
    tokens: int = 3900  # several seconds of it: a fault always finds it in flight
    status: int = 0
    body: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    ended_at: float = 0.0  # wall clock, to be compared with a report's detected_at
    first_byte: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)

    def start(self) -> Client:
        threading.Thread(target=self._run, daemon=True).start()
        return self

    def _run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=180)
        try:
            request = {
                "model": "tiny",
                "prompt": "hello " * 4,
                "max_tokens": self.tokens,
                "ignore_eos": True,
                "stream": self.stream,
            }
            connection.request(
                "POST", "/v1/completions", json.dumps(request), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            self.status = response.status
            self.headers = {k.lower(): v for k, v in response.getheaders()}
            while chunk := response.read1(65536):
                self.first_byte.set()
                self.body += chunk.decode("utf-8", "replace")
                self.body = self.body[-20_000:]
        except (OSError, http.client.HTTPException) as error:
            self.body += f"\n[connection: {error!r}]"
        finally:
            connection.close()
            self.ended_at = time.time()
            self.done.set()

    def error(self) -> dict[str, Any]:
        """The error object this client got, from a body or from a stream; {} when there is none."""
        for line in reversed(self.body.splitlines()):
            text = line.removeprefix("data:").strip()
            with contextlib.suppress(ValueError):
                found = json.loads(text)
                if isinstance(found, dict) and isinstance(found.get("error"), dict):
                    return dict(found["error"])
        return {}


class Supervised:
    """`stallwatch serve -c FILE` with one vLLM named chat."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        limits: Mapping[str, str] = LIMITS,
        environment: Mapping[str, str] | None = None,
        asynchronous: bool = False,
        before: Callable[[Faults], None] = lambda _: None,
        enforce: str = "restart",
        budget: int = 50,
    ) -> None:
        self.folder = folder
        self.port, self.control = free_port(), free_port()
        self.faults = Faults(folder)
        before(self.faults)
        self.shm_before = set(os.listdir("/dev/shm"))
        self.tmp_before = set(os.listdir(tempfile.gettempdir()))
        self.log_path = folder / "stallwatch.log"
        env = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CACHE_ROOT": str(PYTHON.parents[1] / "stallwatch-cache"),
            **self.faults.environment({}, asynchronous=asynchronous),
            **(environment or {}),
        }
        command = [
            *(str(PYTHON), "-m", "vllm.entrypoints.launchers.api_server.entry"),
            *("--model", str(write_model(folder.parent / "tiny-model"))),
            *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", "{port}"),
            *("--enforce-eager", "--max-model-len", "4096", "--max-num-seqs", "16"),
            *arguments,
        ]
        config = folder / "stallwatch.toml"
        config.write_text(
            f"""
[supervisor]
control = "127.0.0.1:{self.control}"
state_dir = {json.dumps(str(folder / "state"))}
[engines.chat]
command = {json.dumps(command)}
port = {self.port}
ready = {{ http = "/health" }}
enforce = "{enforce}"
stop_grace = "20s"
[engines.chat.env]
{chr(10).join(f"{key} = {json.dumps(value)}" for key, value in env.items())}
[engines.chat.limits]
{chr(10).join(f'{key} = "{value}"' for key, value in limits.items())}
[engines.chat.restart]
budget = {budget}
backoff = ["100ms"]
"""
        )
        self._config = config
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                [str(STALLWATCH), "serve", "-c", str(self._config)],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def ensure(self) -> None:
        """Running and READY: started again if an earlier test stopped it."""
        if self.process.poll() is not None:
            self.process = self._start()
        self.wait_ready()

    # -- the daemon's word ---------------------------------------------------------------------

    def get(self, path: str, *, port: int | None = None, timeout: float = 5.0) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port or self.control, timeout=timeout)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException):
            return 0, b""
        finally:
            connection.close()

    def engine(self) -> dict[str, Any]:
        status, body = self.get("/v1/engines/chat")
        return json.loads(body) if status == 200 else {}

    def stalls(self) -> list[dict[str, Any]]:
        status, body = self.get("/v1/stalls")
        return list(json.loads(body)["items"]) if status == 200 else []

    def report(self, stall_id: str) -> dict[str, Any]:
        status, body = self.get(f"/v1/stalls/{stall_id}")
        assert status == 200, body
        return dict(json.loads(body))

    def metric(self, line: str) -> float:
        _, body = self.get("/metrics")
        for row in body.decode().splitlines():
            if row.startswith(line + " "):
                return float(row.rpartition(" ")[2])
        return 0.0

    def events(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_ready(self, incarnation: int = 1, seconds: float = START_S) -> dict[str, Any]:
        def ready() -> dict[str, Any] | None:
            assert self.process.poll() is None, self.tail()
            view = self.engine()
            good = view.get("state") == "ready" and view["incarnation"] >= incarnation
            return view if good else None

        try:
            return dict(until(ready, seconds=seconds, what="READY"))
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.engine()}\n{self.tail()}") from None

    def wait_stall(self, known: set[str], seconds: float) -> dict[str, Any]:
        """The new entry in the ledger; meanwhile `their_health` keeps what vLLM's /health says."""
        self.their_health: list[int] = []

        def fresh() -> dict[str, Any] | None:
            found = next((s for s in self.stalls() if s["id"] not in known), None)
            if found is None:
                self.their_health.append(self.get("/health", port=self.port, timeout=0.5)[0])
            return found

        try:
            return dict(until(fresh, seconds=seconds, what="a stall in the ledger"))
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.engine()}\n{self.tail()}") from None

    def pid(self, address: str) -> int:
        def found() -> int:
            processes = self.engine().get("processes", ())
            return next((int(p["pid"]) for p in processes if p["address"] == address), 0)

        # a starved daemon may leave one question unanswered
        return int(until(found, seconds=20, what=f"a process {address}"))

    def pending(self, address: str) -> int:
        """Requests that a process says it holds; -1: it is not there, or the daemon said nothing."""
        known = self.engine().get("processes", ())
        return next((int(p["pending"]) for p in known if p["address"] == address), -1)

    def member_pids(self) -> set[int]:
        return {int(p["pid"]) for p in self.engine().get("processes", ())}

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.events().splitlines()[-lines:])

    # -- traffic -------------------------------------------------------------------------------

    def client(self, *, stream: bool, tokens: int = 3900) -> Client:
        return Client(self.port, stream, tokens).start()

    def serve_one(self, seconds: float = 60.0) -> Client:
        """One short request that must be served."""
        client = self.client(stream=False, tokens=8)
        assert client.done.wait(seconds), "a request was never answered\n" + self.tail()
        assert client.status == 200, f"{client.status}: {client.body[-300:]}"
        return client

    # -- the end -------------------------------------------------------------------------------

    def stop(self, seconds: float = 60.0) -> int:
        """SIGTERM the daemon; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def end(self) -> None:
        """Whatever happened, nothing of it is left."""
        try:
            self.stop()
        except subprocess.TimeoutExpired:
            members = [psutil.Process(self.process.pid)]
            with contextlib.suppress(psutil.Error):
                members += members[0].children(recursive=True)
            for member in members:
                with contextlib.suppress(psutil.Error):
                    member.kill()
            self.process.wait(10)

    def left_behind(self) -> set[str]:
        """What an engine drops, in /dev/shm and the temporary folder, and was not there before."""
        shm = set(os.listdir("/dev/shm")) - self.shm_before
        tmp = set(os.listdir(tempfile.gettempdir())) - self.tmp_before
        return {name for name in shm | tmp if _DROPPED.match(name)}


# Boards and run folders; multiprocessing's segments and semaphores; vLLM's sockets and stores.
_DROPPED = re.compile(r"stallwatch-chat|sw-|psm_|sem\.mp-|vllm|[0-9a-f]{8}-[0-9a-f]{4}-")


def gone(pids: set[int]) -> bool:
    """None of these processes lives (a zombie does not live)."""
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                return False
    return True
