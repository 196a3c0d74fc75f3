"""An api process with a scripted worker behind it, and the openai client that judges it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

ROOT = Path(__file__).resolve().parent
PATHS = os.pathsep.join(
    str(path) for path in (ROOT.parent / "supervisor", ROOT.parent / "engine", ROOT)
)
MODEL = "tiny"
START_S = 40.0
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SPECIALS = ["<|pad|>", "<|eos|>"]


def byte_tokenizer() -> Tokenizer:
    """One token a byte: every text is legal and lengths are exact."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def write_checkpoint(folder: Path) -> Path:
    """The files that the api reads of a checkpoint."""
    folder.mkdir(exist_ok=True)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|eos|>", "pad_token": {"content": "<|pad|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@dataclass
class Api:
    """A running api process and its worker."""

    port: int
    process: subprocess.Popen[bytes]
    worker: subprocess.Popen[bytes]

    def client(self, timeout: float = 20.0) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="x", max_retries=0, timeout=timeout
        )

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.port}{path}", timeout=10
            ) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metric(self, name: str) -> float:
        """A sample of /metrics by its name with labels, without the prefix."""
        for line in self.get("/metrics")[1].splitlines():
            if line.startswith(f"stallwatch_engine_{name} "):
                return float(line.rsplit(" ", 1)[1])
        raise LookupError(name)

    def until(self, what, seconds: float = 10.0) -> None:
        """Poll with a deadline."""
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, "not in time"
            time.sleep(0.01)

    def raw(self, body: dict, path: str = "/v1/completions") -> socket.socket:
        """A connection with the request sent and nothing read."""
        sock = socket.socket()
        sock.settimeout(20)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        sock.connect(("127.0.0.1", self.port))
        raw = json.dumps({"model": MODEL} | body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
        sock.sendall(head.encode() + raw)
        return sock


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def serving(
    folder: Path, *options: str, env: dict[str, str] | None = None, program: str = ""
) -> Iterator[Api]:
    """An api process that answers /health; both processes are ended and reaped afterwards.

    program: Python text that runs the api in place of its module.
    """
    near, far = socket.socketpair()
    environment = {**os.environ, "PYTHONPATH": PATHS, **(env or {})}
    worker = api = None
    try:
        worker = _start(["-m", "api_worker", str(far.fileno()), str(folder)], far, environment)
        port = free_port()
        arguments = ["--model", str(folder), "--served-name", MODEL, "--port", str(port)]
        arguments += ["--worker-fd", str(near.fileno()), "--worker-pid", str(worker.pid), *options]
        how = ["-c", program] if program else ["-m", "stallwatch_engine.api.main"]
        api = _start([*how, *arguments], near, environment)
        near.close()
        far.close()
        found = Api(port, api, worker)
        _await_health(found)
        yield found
    finally:
        near.close()
        far.close()
        for process in (api, worker):
            if process is not None:
                process.kill()
                process.wait()


def _start(arguments: list[str], end: socket.socket, environment) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, *arguments], pass_fds=[end.fileno()], env=environment)


def _await_health(api: Api) -> None:
    deadline = time.monotonic() + START_S
    while True:
        assert api.process.poll() is None, "the api ended at its start"
        assert time.monotonic() < deadline, "the api did not start"
        with contextlib.suppress(OSError):
            if api.get("/health")[0] == 200:
                return
        time.sleep(0.02)


def read_all(sock: socket.socket) -> bytes:
    """Everything until the server closes; the connection may be reset at the end."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := sock.recv(1 << 16):
            data += chunk
    return data


def stop(process: subprocess.Popen[bytes], number: int = signal.SIGTERM) -> None:
    process.send_signal(number)
