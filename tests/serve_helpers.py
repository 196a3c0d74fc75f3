"""`stallwatch engine serve` as an operator runs it, and proof that nothing of it is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import psutil

from daemon_helpers import free_port

STALLWATCH = str(Path(sys.executable).with_name("stallwatch"))
START_S = 120.0
END_S = 40.0
MODEL = "served"


class Served:
    """A running engine: the api process, its worker and perhaps an offload process."""

    def __init__(self, port: int, process: subprocess.Popen[str]) -> None:
        self.port = port
        self.process = process
        self._clients: list[openai.OpenAI] = []

    def client(self, timeout: float = 60.0) -> openai.OpenAI:
        made = openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="x", max_retries=0, timeout=timeout
        )
        self._clients.append(made)
        return made

    def close(self) -> None:
        """No connection of a test outlives it."""
        for client in self._clients:
            client.close()

    def complete(self, prompt: Any, max_tokens: int = 8, **more: Any) -> Any:
        body = {"ignore_eos": True, **more.pop("extra_body", {})}
        return self.client().completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=more.pop("temperature", 0),
            extra_body=body,
            **more,
        )

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as found:
                return found.status, found.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def metric(self, name: str) -> float:
        """A sample of /metrics by its name with labels, without the prefix."""
        for line in self.get("/metrics")[1].splitlines():
            if line.startswith(f"stallwatch_engine_{name} "):
                return float(line.rsplit(" ", 1)[1])
        raise LookupError(name)

    def children(self, role: str) -> list[psutil.Process]:
        """Processes of that role below the api."""
        with contextlib.suppress(psutil.NoSuchProcess):
            below = psutil.Process(self.process.pid).children(recursive=True)
            return [p for p in below if f"{role}.main" in " ".join(p.cmdline())]
        return []

    def until(self, what: Callable[[], Any], seconds: float = 20.0) -> Any:
        """Poll with a deadline."""
        deadline = time.monotonic() + seconds
        while not (found := what()):
            assert time.monotonic() < deadline, "not in time"
            time.sleep(0.02)
        return found

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(END_S)


def start(folder: Path, *options: str, env: dict[str, str] | None = None, **more: Any) -> Served:
    """The process, perhaps not ready yet."""
    port = free_port()
    command = [STALLWATCH, "engine", "serve", "--model", str(folder), "--port", str(port)]
    command += ["--served-name", MODEL, *options]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("STALLWATCH")}
    environment |= {"OMP_NUM_THREADS": "1", **(env or {})}
    return Served(port, subprocess.Popen(command, env=environment, text=True, **more))


@contextlib.contextmanager
def served(folder: Path, *options: str, env: dict[str, str] | None = None) -> Iterator[Served]:
    """An engine that is ready; ended with everything below it."""
    engine = start(folder, *options, env=env)
    below: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + START_S
        while engine.get("/health")[0] != 200:
            assert engine.process.poll() is None, "the engine ended at its start"
            assert time.monotonic() < deadline, "the engine did not start"
            time.sleep(0.05)
        below = psutil.Process(engine.process.pid).children(recursive=True)
        yield engine
    finally:
        engine.close()
        if engine.process.poll() is None:
            engine.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                engine.process.wait(END_S)
        if engine.process.poll() is None:
            engine.process.kill()
            engine.process.wait()
        _, left = psutil.wait_procs(below, timeout=10)
        for process in left:
            process.kill()
        assert not left, f"processes were left: {left}"


def spoiled(folder: Path, target: Path, token: int) -> Path:
    """The same checkpoint with an embedding of NaN for one token: prompts that hold it have no logits."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, target)
    file = target / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    tensors[name][token] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    return target


def bodies(error: openai.APIStatusError) -> Any:
    """The error object of an answer."""
    return json.loads(error.response.text)["error"]
