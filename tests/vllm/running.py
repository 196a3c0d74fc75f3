"""One real vLLM with our plugin injected, and no daemon: what the plugin's own tests run against."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from faults import Faults

from stallwatch.board.control import ControlWriter
from stallwatch.board.create import BoardFolder
from stallwatch.board.image import BoardImage
from stallwatch.board.reader import BoardReader
from stallwatch.clock import SystemClock
from stallwatch.inject import prepare

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
START_S = 180.0


def available() -> bool:
    """Whether the vLLM environment is here (make venv-vllm)."""
    return PYTHON.exists()


def write_model(folder: Path) -> Path:
    """The tiny checkpoint, written by the environment that serves it."""
    if not (folder / "config.json").exists():
        subprocess.run(
            [PYTHON, "-m", "stallwatch_engine.tiny_vllm", str(folder)],
            env={**os.environ, "PYTHONPATH": str(ROOT / "engine")},
            check=True,
            timeout=60,
            stdout=subprocess.DEVNULL,
        )
    return folder


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Running:
    """A vLLM process tree, its board, and a few clients."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        asynchronous: bool = False,
        environment: dict[str, str] | None = None,
        before: Callable[[Faults], None] = lambda _: None,
    ) -> None:
        self.port = free_port()
        self.faults = Faults(folder)
        before(self.faults)
        self.board = BoardFolder.create(Path("/dev/shm"), engine="test", incarnation=1)
        self.control = ControlWriter(self.board.file)
        self._clock = SystemClock()
        self._reader = BoardReader(self.board.path)
        self._members: dict[int, psutil.Process] = {}
        # Short: AF_UNIX paths hold 107 characters, and vLLM appends a UUID.
        self._private = Path("/tmp") / f"swv-{os.getpid()}-{self.port}"
        self._private.mkdir(mode=0o700)
        self._log = (folder / "vllm.log").open("wb")
        self.log_path = folder / "vllm.log"
        model = write_model(folder.parent / "tiny-model")
        self.process = subprocess.Popen(
            [
                *(PYTHON, "-m", "vllm.entrypoints.launchers.api_server.entry"),
                *("--model", str(model), "--served-model-name", "tiny"),
                *("--host", "127.0.0.1", "--port", str(self.port)),
                *("--enforce-eager", "--max-model-len", "4096", "--max-num-seqs", "16"),
                *arguments,
            ],
            env=self._environment(folder, asynchronous=asynchronous) | (environment or {}),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _environment(self, folder: Path, *, asynchronous: bool) -> dict[str, str]:
        kept = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
        base = {
            **kept,
            **self.board.environment(),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_RPC_BASE_PATH": str(self._private),
            "TMPDIR": str(self._private),
            # A cold model-info cache costs a helper process and 8 s at every start.
            "VLLM_CACHE_ROOT": str(PYTHON.parents[1] / "stallwatch-cache"),
        }
        base |= prepare(folder, environ=base)
        base |= self.faults.environment(base, asynchronous=asynchronous)
        return base

    def look(self) -> BoardImage:
        """The board, settled."""
        deadline = time.monotonic() + 10
        while (image := self._reader.look(self._clock)) is None:
            assert time.monotonic() < deadline, "the board cannot be read"
        return image

    def until(self, condition: Callable[[BoardImage], Any], *, seconds: float) -> BoardImage:
        """Look until the condition holds; the log's end is in the error when it does not."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            image = self.look()
            if condition(image):
                return image
            self._remember()
            if self.process.poll() is not None:
                break
            time.sleep(0.02)  # a poll with a deadline
        raise AssertionError(f"not in {seconds} s: {describe(self.look())}\n{self.tail()}")

    def wait_ready(self) -> BoardImage:
        """Every role has attached and said ready."""
        roles = {"api", "core", "worker"}
        return self.until(
            lambda image: {p.role for p in image.processes if p.ready} == roles, seconds=START_S
        )

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def request(
        self, *, stream: bool = False, tokens: int = 16, path: str = "/v1/completions"
    ) -> Reply:
        """One request in a thread of its own."""
        return Reply(self.port, path, stream=stream, tokens=tokens)

    def get(self, path: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        finally:
            connection.close()

    def _remember(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self._members.setdefault(child.pid, child)

    def close(self) -> None:
        """End the whole tree; Python's resource_tracker last, by itself: it unlinks shared memory."""
        self._remember()
        trackers = []
        for member in self._members.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "resource_tracker" in " ".join(member.cmdline()):
                    trackers.append(member)
                else:
                    member.send_signal(signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(20)
        psutil.wait_procs(list(self._members.values()), timeout=15)
        self._log.close()
        self._reader.close()
        self.control.close()
        self.board.remove()
        shutil.rmtree(self._private, ignore_errors=True)


class Reply:
    """What one client got: status, headers, body, and how the connection ended."""

    def __init__(self, port: int, path: str, *, stream: bool, tokens: int) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.broken = False  # the body ended without its last chunk
        self.answered_ns = 0
        self._asked = (port, path, stream, tokens)
        self.first = threading.Event()  # the first bytes of the body are here
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        port, path, stream, tokens = self._asked
        chat = path.endswith("chat/completions")
        what = {"messages": [{"role": "user", "content": "hello"}]} if chat else {"prompt": "hello"}
        body = {
            "model": "tiny",
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
        }
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        try:
            connection.request(
                "POST", path, json.dumps(body | what), {"content-type": "application/json"}
            )
            response = connection.getresponse()
            self.status = response.status
            self.headers = {key.lower(): value for key, value in response.getheaders()}
            while chunk := response.read1(65536):
                self.body += chunk
                self.first.set()
        except http.client.IncompleteRead as problem:
            self.body += problem.partial
            self.broken = True
        except (OSError, http.client.HTTPException):
            self.broken = True
        finally:
            self.answered_ns = time.monotonic_ns()
            self.first.set()
            connection.close()

    def wait(self, seconds: float) -> Reply:
        """The finished reply; AssertionError when the client still waits."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"the client still waits after {seconds} s"
        return self

    def events(self) -> list[str]:
        return [part[6:] for part in self.body.decode().split("\n\n") if part.startswith("data: ")]


def describe(image: BoardImage) -> str:
    """One line per lane, for failed assertions."""
    processes = [f"{p.address} ready={p.ready} pending={p.pending}" for p in image.processes]
    lanes = [
        f"{lane.address} {'/'.join(f.name for f in lane.stack)} work={lane.work} beats={lane.beats}"
        for lane in image.lanes
    ]
    return "\n".join([*processes, *lanes, *image.problems])


@contextlib.contextmanager
def running(folder: Path, *arguments: str, **options: Any) -> Iterator[Running]:
    """A vLLM that is ended whatever happens. Options: see Running."""
    made = Running(folder, *arguments, **options)
    try:
        yield made
    finally:
        made.close()
