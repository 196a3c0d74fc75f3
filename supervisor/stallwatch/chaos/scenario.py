"""A scenario program: its header, and one run of it under a supervisor of its own.

    # /// scenario
    # kind = "GIL_HELD"            # '' : no verdict may come
    # culprit = "worker:0/model"   # '*' and '?' as in file names
    # action = "restart"
    # limits = { default = "1500ms" }
    # ///

The program is started as `python PROGRAM --seed N`. Nothing of it or of the supervisor is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stallwatch.chaos.card import Card, Done, grade
from stallwatch.cli.client import Client
from stallwatch.cli.settings import Settings
from stallwatch.errors import DaemonUnreachable, StallwatchError

_HEADER = re.compile(r"^# /// scenario\n((?:#(?: .*)?\n)+?)# ///$", re.MULTILINE)
_MAX_FILE = 1 << 20
_MAX_TEMPDIR = 60  # bytes; what is added below it fits into the rest
_ENGINE = "scenario"
_START_S = 30.0
_END_S = 30.0
_POLL_S = 0.1
# What the timeline says last, by the action: the kind is final then.
_LAST = {"fail": "tree gone", "restart": "tree gone", "observe": "further stacks"}
_KNOWN = {"kind", "culprit", "action", "limits", "watch", "ranks", "slow", "late_s", "edges"}


@dataclass(frozen=True, slots=True)
class Scenario:
    """What the header says. watch: for how long nothing may be said, when kind is ''."""

    path: Path
    kind: str = ""
    culprit: str = ""
    action: str = ""
    limits: Mapping[str, str] = field(default_factory=dict)
    watch: float = 5.0
    ranks: int = 0


def read(path: Path) -> Scenario:
    """The scenario of a file. Raises StallwatchError when it is none, or needs more than we can do."""
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_FILE).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise StallwatchError(f"{path} cannot be read: {error}") from None
    found = _HEADER.search(text)
    if found is None:
        raise StallwatchError(
            f"{path} has no scenario header", hint="it begins with the line `# /// scenario`"
        )
    body = "\n".join(line[1:].removeprefix(" ") for line in found.group(1).splitlines())
    try:
        said = tomllib.loads(body)
    except tomllib.TOMLDecodeError as error:
        raise StallwatchError(f"{path}: its header is no TOML: {error}") from None
    if more := sorted(set(said) - _KNOWN):
        raise StallwatchError(
            f"{path.name} needs {', '.join(more)}: that is done from outside, by the test suite only",
            hint="`make scenarios` in a source checkout runs it",
        )
    kept = {
        k: said[k] for k in ("kind", "culprit", "action", "limits", "watch", "ranks") if k in said
    }
    return Scenario(path.absolute(), **kept)


def run(scenario: Scenario, seed: int, *, wait_s: float) -> Card:
    """Run it to its verdict, or for `wait_s` (a false-alarm scenario: for its own time)."""
    folder = place()
    try:
        with _supervised(scenario, seed, folder) as client:
            report = _report(client, scenario.watch if not scenario.kind else wait_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    culprit = scenario.culprit.format(odd=seed % max(1, scenario.ranks))
    done = Done(
        what=scenario.path.stem,
        kinds=(scenario.kind,) if scenario.kind else (),
        culprit=culprit,
        seed=seed,
        quiet=not scenario.kind,
        action=scenario.action,
    )
    return grade(done, report)


def place() -> Path:
    """A new private folder; outside of TMPDIR where that is too long for a socket's path (107 bytes)."""
    asked = tempfile.gettempdir()
    room = len(os.fsencode(asked)) <= _MAX_TEMPDIR
    return Path(tempfile.mkdtemp(prefix="stallwatch-chaos-", dir=asked if room else "/tmp"))  # noqa: S108 - mkdtemp


@contextlib.contextmanager
def _supervised(scenario: Scenario, seed: int, folder: Path) -> Iterator[Client]:
    (folder / "tmp").mkdir()
    config = folder / "stallwatch.toml"
    config.write_text(_config(scenario, seed, folder))
    env = {k: v for k, v in os.environ.items() if not k.startswith("STALLWATCH_")}
    log = (folder / "log").open("wb")
    argv = [sys.executable, "-m", "stallwatch.cli.main", "serve", "-c", str(config)]
    daemon = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        env={**env, "TMPDIR": str(folder / "tmp")},
    )
    try:
        yield _answering(daemon, folder)
    finally:
        log.close()
        _end(daemon)


def _config(scenario: Scenario, seed: int, folder: Path) -> str:
    limits = {"compile": "1500ms", "start": "60s", **scenario.limits}
    command = [sys.executable, str(scenario.path), "--seed", str(seed)]
    rows = [
        "[supervisor]",
        f'control = "127.0.0.1:{_free_port()}"',
        f"state_dir = {json.dumps(str(folder / 'state'))}",
        f"[engines.{_ENGINE}]",
        f"command = {json.dumps(command)}",
        'plugin = "off"',
        'stop_grace = "1500ms"',
        'drain = "100ms"',
        f"[engines.{_ENGINE}.limits]",
        *(f"{json.dumps(k)} = {json.dumps(str(v))}" for k, v in limits.items()),
        f"[engines.{_ENGINE}.restart]",
        'backoff = ["60s"]',
    ]
    return "\n".join(rows) + "\n"


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _answering(daemon: subprocess.Popen[bytes], folder: Path) -> Client:
    client = Client(Settings(socket=str(folder / "state" / "control.sock")))
    until = time.monotonic() + _START_S
    while True:
        try:
            client.get("/v1/engines")
            return client
        except DaemonUnreachable as error:
            if daemon.poll() is not None or time.monotonic() > until:
                tail = (folder / "log").read_text(errors="replace")[-500:]
                raise StallwatchError(
                    f"the scenario's supervisor does not answer: {error.message}", hint=tail
                ) from None
        time.sleep(_POLL_S)


def _report(client: Client, wait_s: float) -> dict[str, Any] | None:
    """The first verdict's report, once what was done about it is in it too."""
    until = time.monotonic() + wait_s
    while time.monotonic() < until:
        if items := client.get("/v1/stalls")["items"]:
            return finished(client, str(items[-1]["id"]))
        time.sleep(_POLL_S)
    return None


def finished(client: Client, stall_id: str, within_s: float = 30.0) -> dict[str, Any]:
    """The report when its kind is final, or as it is when the time is over."""
    until = time.monotonic() + within_s
    while True:
        report: dict[str, Any] = client.get(f"/v1/stalls/{stall_id}")
        texts = [str(step.get("text", "")) for step in report.get("timeline", [])]
        last = _LAST.get(str(report.get("action")), "")
        if any(last in text for text in texts) or time.monotonic() > until:
            return report
        time.sleep(_POLL_S)


def _end(daemon: subprocess.Popen[bytes]) -> None:
    """Ask it to stop, then insist. Its own end takes the engine with it."""
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        if daemon.poll() is None:
            daemon.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(_END_S / 2)
