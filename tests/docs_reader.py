"""A reader of the documentation: a home of its own, and commands that are run as they are printed.

What a page leaves to its reader is filled in by the tables here: ports that are free, an id that
exists, a file that the reader is said to have.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from daemon_helpers import free_port, request, toml, until
from docs_blocks import Plan

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
BIN = Path(sys.executable).parent
BLOCK_S, SERVE_S, END_S = 60.0, 30.0, 20.0

# Files that a reader is said to have.
FILES: Mapping[str, str] = {
    "conversations.json": json.dumps(
        [{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}]
    ),
    "calls.jsonl": "".join(f'{{"prompt": "hi", "at": {at / 100}}}\n' for at in range(5)),
    "my_stall.py": """\
# /// scenario
# kind = "GIL_HELD"
# culprit = "worker:0/model"
# action = "restart"
# limits = { default = "1500ms", compile = "1500ms" }
# ///
import ctypes
from stallwatch import heartbeat

board = heartbeat.attach(role="worker", rank=0)
lane = board.lane("model")
board.ready()
lane.enter("execute_model")
ctypes.PyDLL(None).pause()
""",
}
# Sizes and limits that only make a reader wait.
SMALLER: Mapping[str, str] = {
    "--request-rate 8": "--request-rate 80",
    "-n 500": "-n 20",
    "step=5s": "step=1s",
}


class Reader:
    """One page's reader. Everything it started ends with it."""

    def __init__(self, folder: Path, *, hang: bool) -> None:
        self.folder = folder
        self.home, self.work = folder / "home", folder / "work"
        for made in (self.home, self.work, folder / "bin"):
            made.mkdir(mode=0o700)
        for name in ("docs", "deploy", "tests"):
            (self.work / name).symlink_to(ROOT / name)
        for name, text in FILES.items():
            (self.work / name).write_text(text)
        if not hang:  # an engine that hangs answers 503 where it should
            (self.home / ".curlrc").write_text("fail\n")
        self.control, self.engine, self.clients = free_port(), free_port(), free_port()
        stub = folder / "bin" / "vllm"
        code = f"import sys; sys.path.insert(0, {str(TESTS)!r}); import docs_engine"
        stub.write_text(f"#!{sys.executable}\n{code}\ndocs_engine.main(sys.argv[1:])\n")
        stub.chmod(0o700)
        given = {k: v for k, v in os.environ.items() if not k.startswith(("STALLWATCH", "XDG_"))}
        self.env = {
            **given,
            "HOME": str(self.home),
            "TMPDIR": str(folder / "tmp"),
            "PATH": f"{folder / 'bin'}:{BIN}:{os.environ['PATH']}",
            "STALLWATCH_LOG": "console",
            "NO_COLOR": "1",
            **({"STUB_HANG": "1"} if hang else {}),
        }
        self._serving: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._beside: set[str] = set()
        self.socket = self.home / ".local/state/stallwatch/control.sock"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: object, __: TracebackType | None
    ) -> None:
        ends = [(name, self._end(process)) for name, process in reversed(self._serving)]
        if kind is None:
            assert all(code in (0, -signal.SIGTERM) for _, code in ends), ends

    def _end(self, process: subprocess.Popen[bytes]) -> int | None:
        for wait_s in (3.0, END_S):  # the second one ends drain and grace
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(wait_s)
        process.kill()
        process.wait()
        return None

    # -- running -------------------------------------------------------------------------------

    def run(self, plan: Plan) -> None:
        """The block, and whatever it needs beside it. AssertionError with all that was said."""
        if plan.beside and plan.beside not in self._beside:
            self._beside.add(plan.beside)
            {"daemon": self._daemon, "server": self._server}[plan.beside]()
        commands = [self.filled(each) for each in plan.commands]
        served = commands.pop() if plan.until else ""
        if commands:
            self._bash(plan, commands)
        if served:
            self._serve(plan.block.place, served, plan.until)

    def _bash(self, plan: Plan, commands: list[str]) -> None:
        script = "\n".join(["set -euo pipefail", *commands])
        try:
            done = subprocess.run(
                ["bash", "-xc", script], cwd=self.work, env=self.env, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, timeout=BLOCK_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as late:
            raise AssertionError(f"{plan.block.place}: {late}\n{late.stderr!r}") from None
        said = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}\n{self._said()}"
        assert done.returncode == 0, f"{plan.block.place}: exit {done.returncode}\n{said}"

    def _serve(self, name: str, command: str, mark: str) -> None:
        log = self.folder / f"served-{len(self._serving)}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"], cwd=self.work, env=self.env,
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip
        self._serving.append((name, process))

        def said() -> bool:
            text = log.read_text(errors="replace")
            assert process.poll() is None, f"{name}: it ended: {process.returncode}\n{text}"
            return mark in text

        try:
            until(said, seconds=SERVE_S, what=f"{name}: {mark!r}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{log.read_text(errors='replace')[-3000:]}") from None

    def _said(self) -> str:
        logs = sorted(self.folder.glob("served-*.log"))
        return "\n".join(log.read_text(errors="replace")[-2000:] for log in logs)

    # -- what is beside ------------------------------------------------------------------------

    def _daemon(self) -> None:
        engine = {
            "command": ["vllm", "serve", "MODEL", "--port", "{port}"],
            "port": self.engine,
            "drain": "100ms",
            "stop_grace": "500ms",
            "limits": {"default": "1500ms", "compile": "1500ms"},
            "restart": {"budget": 1000, "backoff": ["10ms"]},
        }
        file = self.work / "beside.toml"
        file.write_text(toml({"supervisor": {"chaos": True}, "engines": {"chat": engine}}))
        command = f"stallwatch serve -c {file} --control 127.0.0.1:{self.control}"
        self._serve("the daemon beside", command, "chat")
        until(lambda: self.ask("/readyz") is not None, seconds=SERVE_S, what="chat is ready")

    def _server(self) -> None:
        self._serve("the server beside", f"vllm serve MODEL --port {self.clients}", "")

        def there() -> bool:
            return request("GET", self.clients, "/v1/models")[0] == 200

        until(there, seconds=SERVE_S, what="the server answers")

    # -- filling in ----------------------------------------------------------------------------

    def ask(self, path: str) -> Any:
        """The daemon's answer as JSON or text; None when it is no 200."""
        status, body = request("GET", self.control, path)
        if status != 200:
            return None
        text = body.decode()
        return json.loads(text) if text.startswith(("{", "[")) else text

    def _stall(self) -> str:
        def found() -> str:
            items = (self.ask("/v1/stalls") or {}).get("items") or [{}]
            return str(items[0].get("id", ""))

        return str(until(found, seconds=SERVE_S, what="a stall"))

    def _pid(self) -> str:
        def found() -> str:
            view = self.ask("/v1/engines/chat") or {}
            known = view.get("processes", ())
            return next((f"pid:{p['pid']}" for p in known if p["address"] == "worker:0"), "")

        return str(until(found, seconds=SERVE_S, what="a worker"))

    def filled(self, command: str) -> str:
        """The command with what a reader would fill in."""
        for text, other in SMALLER.items():
            command = command.replace(text, other)
        table: Mapping[str, Callable[[], str]] = {
            r"st-20261130T031502Z-9f2c41aa": self._stall,
            r"pid:4243": self._pid,
            r"\b9470\b": lambda: str(self.control),
            r"\b8001\b": lambda: str(self.engine),
            r"\b8000\b": lambda: str(self.clients),
            r"/var/lib/stallwatch": lambda: str(self.home / ".local/state/stallwatch"),
            r"^stallwatch serve\b": lambda: f"stallwatch serve --control 127.0.0.1:{self.control}",
            r"^stallwatch bench(?! --url)": lambda: (
                f"stallwatch bench --url http://127.0.0.1:{self.clients}"
            ),
        }
        for pattern, value in table.items():
            if re.search(pattern, command):
                command = re.sub(pattern, value(), command)
        return command
