"""`stallwatch serve` as an operator runs it, with small engines, and proof that nothing is left."""

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
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

STALLWATCH = str(Path(sys.executable).with_name("stallwatch"))
ENGINES = str(Path(__file__).with_name("daemon_engines.py"))
START_S = 20.0
END_S = 25.0


def until(condition: Callable[[], Any], *, seconds: float = START_S, what: str) -> Any:
    """The condition's first true value; AssertionError naming `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.02)  # a poll with a deadline
    raise AssertionError(f"not within {seconds:g} s: {what}")


_given: set[int] = set()


def free_port() -> int:
    """A port nobody listens on, outside the range that connections draw from, given out once."""
    # Workers of one session have neighbouring pids: each searches a range of its own.
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 3
    for port in range(20_000 + 4_000 * worker + os.getpid() % 3_000, 32_000):
        if port in _given:
            continue
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
        _given.add(port)
        return port
    raise AssertionError("no free port")


def toml(table: Mapping[str, Any], name: str = "") -> str:
    """Nested dicts as TOML: strings, numbers, booleans and lists of those."""
    values = {k: v for k, v in table.items() if not isinstance(v, Mapping)}
    lines = [f"[{name}]"] if name else []
    lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    for key, value in table.items():
        if isinstance(value, Mapping):
            lines.append(toml(value, f"{name}.{key}" if name else key))
    return "\n".join(lines) + "\n"


def mentioning(path: Path) -> list[psutil.Process]:
    """Every living process whose command line or environment names the folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            words = "\0".join(process.cmdline())
            with contextlib.suppress(psutil.Error):
                words += "\0".join(process.environ().values())
            if f"{path}" in words:
                found.append(process)
    return found


@contextlib.contextmanager
def place() -> Iterator[Path]:
    """A short private folder; at the end no process names it, no board and no temporary is left."""
    path = Path(tempfile.mkdtemp(prefix="swt-"))
    (path / "tmp").mkdir()
    try:
        yield path
        with contextlib.suppress(AssertionError):
            until(lambda: not mentioning(path), seconds=2.0, what="processes end")
        left = [" ".join(p.cmdline()) for p in mentioning(path) if p.is_running()]
        assert not left, f"processes were left: {left}"
        assert not boards(path), "boards were left"
        assert not os.listdir(path / "tmp"), f"left in TMPDIR: {os.listdir(path / 'tmp')}"
    finally:
        for process in mentioning(path):
            with contextlib.suppress(psutil.Error):
                process.kill()
        for board in boards(path):
            shutil.rmtree(board, ignore_errors=True)
        shutil.rmtree(path, ignore_errors=True)


def boards(path: Path) -> list[str]:
    """Board folders of engines of this place; their names begin with the place's."""
    return [
        os.path.join("/dev/shm", name)
        for name in os.listdir("/dev/shm")
        if name.startswith(f"stallwatch-{tag(path)}")
    ]


def tag(path: Path) -> str:
    """A prefix for engine names that nobody else on this machine uses."""
    return "".join(c if c.isalnum() else "-" for c in path.name.lower())


class Daemon:
    """One `stallwatch serve`, its words, and its end. The engine is called `TAG-chat`."""

    def __init__(
        self,
        folder: Path,
        engine: Mapping[str, Any] | None = None,
        *flags: str,
        supervisor: Mapping[str, Any] | None = None,
        more: Mapping[str, Mapping[str, Any]] | None = None,
        env: Mapping[str, str] | None = None,
        argv: Sequence[str] | None = None,
        before: Sequence[str] = (),
        stderr: int | None = None,
        text: str | None = None,
    ) -> None:
        self.folder = folder
        self.name = f"{tag(folder)}-chat"
        self.control = free_port()
        self.port = free_port()
        self.state = folder / "state"
        self.log_path = folder / "stderr.log"
        self.file = folder / "stallwatch.toml"
        self.engine_config: dict[str, Any] = {
            "command": [sys.executable, ENGINES, "api", str(folder), "{port}", *flags],
            "port": self.port,
            "stop_grace": "5s",
            "drain": "5s",
            "limits": {"default": "1s", "compile": "1s", "start": "30s"},
            "restart": {"budget": 1000, "backoff": ["10ms"]},
        }
        for key, value in (engine or {}).items():
            if value is None:
                del self.engine_config[key]
            else:
                self.engine_config[key] = value
        self.supervisor: dict[str, Any] = {
            "control": f"127.0.0.1:{self.control}",
            "state_dir": str(self.state),
            **(supervisor or {}),
        }
        self.more = dict(more or {})
        self.write(text)
        if argv is None:
            argv = ["-c", str(self.file)]
        self.argv = [*before, STALLWATCH, "serve", *argv]
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith("STALLWATCH")},
            "TMPDIR": str(folder / "tmp"),
            "STALLWATCH_LOG": "json",
            **(env or {}),
        }
        self.start(stderr)

    def write(self, text: str | None = None) -> None:
        """The configuration file as it is now in memory."""
        engines = {self.name: self.engine_config, **self.more}
        self.file.touch(mode=0o600)  # an engine may be given a secret
        if os.geteuid() == 0:  # whoever has the folder is to read it
            owner = self.folder.stat()
            os.chown(self.file, owner.st_uid, owner.st_gid)
        self.file.write_text(text or toml({"supervisor": self.supervisor, "engines": engines}))

    def start(self, stderr: int | None = None) -> None:
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log if stderr is None else stderr,
                env=self.env,
                start_new_session=True,
            )

    # -- its words -----------------------------------------------------------------------------

    def get(self, path: str) -> tuple[int, bytes]:
        return request("GET", self.control, path)

    def json(self, path: str) -> Any:
        status, body = self.get(path)
        return json.loads(body) if status == 200 else {}

    def engine(self, name: str = "") -> dict[str, Any]:
        return dict(self.json(f"/v1/engines/{name or self.name}"))

    def stalls(self) -> list[dict[str, Any]]:
        return list(self.json("/v1/stalls").get("items", ()))

    def report(self, stall_id: str) -> dict[str, Any]:
        return dict(self.json(f"/v1/stalls/{stall_id}"))

    def events(self) -> list[dict[str, Any]]:
        return list(self.json("/v1/events?follow=false").get("items", ()))

    def said(self, words: str) -> bool:
        return any(words in event["message"] for event in self.events())

    def metric(self, begins: str) -> float:
        _, body = self.get("/metrics")
        rows = [r for r in body.decode().splitlines() if r.startswith(begins)]
        return sum(float(row.rpartition(" ")[2]) for row in rows)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def cli(self, *words: str, seconds: float = 30.0) -> subprocess.CompletedProcess[str]:
        """A command against this daemon's socket."""
        return subprocess.run(
            [STALLWATCH, words[0], "--socket", str(self.state / "control.sock"), *words[1:]],
            capture_output=True,
            text=True,
            timeout=seconds,
            env=self.env,
            check=False,
        )

    # -- waiting -------------------------------------------------------------------------------

    def wait(self, condition: Callable[[], Any], what: str, seconds: float = START_S) -> Any:
        """As `until`, with everything that explains a failure."""

        def living() -> Any:
            assert self.process.poll() is None, f"the daemon ended: {self.process.returncode}"
            return condition()

        try:
            return until(living, seconds=seconds, what=what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.engine()}\n{self.log()[-6000:]}") from None

    def wait_state(self, *states: str, name: str = "", seconds: float = START_S) -> dict[str, Any]:
        def there() -> dict[str, Any] | None:
            view = self.engine(name)
            return view if view.get("state") in states else None

        return dict(self.wait(there, f"state {states}", seconds))

    def wait_ready(self, incarnation: int = 1, name: str = "") -> dict[str, Any]:
        def there() -> dict[str, Any] | None:
            view = self.engine(name)
            good = view.get("state") == "ready" and view["incarnation"] >= incarnation
            # members are recorded ten times a second: the worker may be seen a moment later
            api = "api" in view.get("command", ())
            return view if good and len(view["processes"]) >= 1 + api else None

        return dict(self.wait(there, f"READY, incarnation {incarnation}"))

    def wait_stall(self, known: set[str] = frozenset(), seconds: float = START_S) -> dict[str, Any]:  # type: ignore[assignment]
        def fresh() -> dict[str, Any] | None:
            return next((s for s in self.stalls() if s["id"] not in known), None)

        found = self.wait(fresh, "a stall in the ledger", seconds)
        return self.report(found["id"])

    def wait_exit(self, seconds: float = END_S) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the daemon did not end:\n{self.log()[-6000:]}") from None

    # -- acting --------------------------------------------------------------------------------

    def order(self, role: str, word: str) -> None:
        """An order that one process of that role will take."""
        part = self.folder / f"{role}.part"
        part.write_text(word)
        part.rename(self.folder / f"{role}.order")

    def release(self) -> None:
        (self.folder / "release").touch()

    def hold_again(self) -> None:
        (self.folder / "release").unlink(missing_ok=True)

    def pid(self, address: str) -> int:
        def found() -> int:
            known = self.engine().get("processes", ())
            return next((int(p["pid"]) for p in known if p["address"] == address), 0)

        return int(self.wait(found, f"a process {address}"))

    def members(self) -> set[int]:
        return {int(p["pid"]) for p in self.engine().get("processes", ())}

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.wait_exit()

    def end(self) -> None:
        """Whatever happened, the daemon is gone; what it leaves is for place() to find."""
        try:
            self.stop()
        except AssertionError:
            self.process.kill()
            self.process.wait(10)


def request(method: str, port: int, path: str, seconds: float = 10.0) -> tuple[int, bytes]:
    """Status and body; status 0 when nobody answered."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


@contextlib.contextmanager
def daemon(folder: Path, *args: Any, **options: Any) -> Iterator[Daemon]:
    """A daemon for one test."""
    found = Daemon(folder, *args, **options)
    try:
        yield found
    finally:
        found.end()


def gone(pids: set[int]) -> bool:
    """None of these processes lives (a zombie does not live)."""
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                return False
    return True
