"""One scenario through the real daemon: what was expected, what was said, how late, what was done."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import signal
import socket
import sys
import time
import tomllib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dead_device import DEVICE, DeadDevice

from daemon_helpers import Daemon, daemon, place, until

PROGRAMS = Path(__file__).with_name("programs")
_HEADER = re.compile(r"^# /// scenario\n((?:# ?.*\n)+?)# ///$", re.MULTILINE)
_STALL_S = 45.0
_EXPLAINED = 3000  # characters of what the engine and the daemon said, when nothing came
_DEFAULTS = {"compile": "1500ms", "start": "60s"}


@dataclass(frozen=True)
class Scenario:
    """The header of one program. kind '': no verdict may come within `watch` seconds."""

    name: str
    path: Path
    about: str
    kind: str
    culprit: str = (
        ""  # process, lane or channel; '*' and '?' as in file names, {odd} = seed % ranks
    )
    action: str = ""
    limits: dict[str, str] = field(default_factory=dict)
    edges: list[list[str]] = field(default_factory=list)
    watch: float = 5.0
    ranks: int = 0
    late_s: float = 0.0  # 0: lateness is shown, not judged
    do: str = ""  # what is done to it from outside: stop, suspend, stacks, hold-port, dead-device
    state: str = ""  # where the engine must end up
    says: str = ""  # part of the reason that a pre-flight gives
    cache: str = ""  # a file to make in TORCH_EXTENSIONS_DIR beforehand
    port: bool = False
    slow: bool = False  # left out of the subset

    @property
    def code(self) -> str:
        """'K07', 'F1'."""
        return self.name.partition("_")[0].upper()


@dataclass
class Outcome:
    """What one run gave."""

    scenario: str
    seed: int
    expected: str
    got: str = ""
    culprit: str = ""
    confidence: str = ""
    action: str = ""
    late_s: float | None = None  # from the limit to confirmed
    took_s: float = 0.0
    summary: str = ""
    wrong: list[str] = field(default_factory=list)

    @property
    def right(self) -> bool:
        return not self.wrong

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "right": self.right}


def scenarios() -> list[Scenario]:
    """All programs, by name."""
    found = []
    for path in sorted(PROGRAMS.glob("[kf][0-9][0-9]_*.py")):
        text = path.read_text()
        header = _HEADER.search(text)
        assert header is not None, f"{path.name} has no header"
        lines = (line[1:].removeprefix(" ") for line in header.group(1).splitlines())
        about = text.partition('"""')[2].partition('"""')[0]
        found.append(Scenario(path.stem, path, about, **tomllib.loads("\n".join(lines))))
    return found


def impossible(scenario: Scenario) -> str:
    """Why this machine or user cannot run it, or ''."""
    if scenario.do != "dead-device":
        return ""
    if os.geteuid() != 0:
        return "only root may mount a dead device"
    return "" if os.access(DEVICE, os.R_OK | os.W_OK) else f"no {DEVICE} here"


def run(scenario: Scenario, seed: int = 0) -> Outcome:
    """Run it. What did not come in time is among `wrong`; nothing of it is left behind."""
    out = Outcome(scenario.name, seed, scenario.kind or "no verdict")
    if why := impossible(scenario):
        out.got = out.summary = f"left out: {why}"
        return out
    began = time.monotonic()
    with place() as folder:
        settings = _settings(scenario, seed, folder)
        with contextlib.ExitStack() as held:
            if scenario.do == "hold-port":
                held.enter_context(socket.create_server(("127.0.0.1", settings["port"])))
            if scenario.do == "dead-device":
                device = DeadDevice(folder)
                held.callback(device.close)
                settings["env"]["SCENARIO_DEVICE"] = str(device.path)
            running = held.enter_context(daemon(folder, settings))
            if scenario.do == "dead-device":
                held.callback(_mend, device, running)
            try:
                _act(scenario, running)
                _judge(scenario, running, out)
            except AssertionError as error:
                first, _, rest = str(error).partition("\n")
                out.wrong.append(first)
                out.summary = out.summary or rest[:_EXPLAINED]
    out.took_s = time.monotonic() - began
    return out


def _settings(scenario: Scenario, seed: int, folder: Path) -> dict[str, Any]:
    env = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p.endswith("supervisor"))}
    if scenario.cache:
        cache = folder / "cache"
        cache.mkdir()
        (cache / scenario.cache).touch()
        env["TORCH_EXTENSIONS_DIR"] = str(cache)
    exhausts = scenario.state == "exhausted"
    return {
        "command": [sys.executable, str(scenario.path), "--seed", str(seed)],
        "env": env,
        "port": _port(scenario),
        "stop_grace": "1500ms",
        "drain": "100ms",
        "limits": {**_DEFAULTS, **scenario.limits},
        "restart": {"budget": 3 if exhausts else 1000, "backoff": ["10ms" if exhausts else "60s"]},
        "plugin": "off",
    }


def _mend(device: DeadDevice, running: Daemon) -> None:
    """The driver answers again: what was killed dies, and a restart that is asked for buries it."""
    device.close()
    if running.engine().get("state") == "unkillable":
        running.cli("restart", running.name)
        until(lambda: running.engine().get("incarnation") == 2, what="the engine's next start")


def _port(scenario: Scenario) -> int | None:
    if not scenario.port:
        return None
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _act(scenario: Scenario, running: Daemon) -> None:
    """What is done from outside, once the engine is up."""
    if scenario.do == "stop":
        running.wait_state("ready")
        time.sleep(1.5)  # the program works for a moment before it falls asleep
        running.cli("restart", running.name)
    elif scenario.do == "suspend":
        running.wait_state("ready")
        _suspend(running, 3.0)
    elif scenario.do == "stacks":
        running.wait_state("ready")
        for _ in range(3):
            assert running.cli("stacks", running.name).returncode == 0


def _suspend(running: Daemon, seconds: float) -> None:
    """All of them stand still, as on a machine that sleeps. Whoever runs this stays awake."""
    pids = [running.process.pid, *running.members()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    for pid in reversed(pids):
        os.kill(pid, signal.SIGCONT)


def _judge(scenario: Scenario, running: Daemon, out: Outcome) -> None:
    if not scenario.kind:
        _watch(scenario, running, out)
        return
    if scenario.says:
        _refused(scenario, running, out)
        return
    stall = running.wait_stall(seconds=_STALL_S)
    report = running.wait(lambda: _whole(running, stall["id"]), "the whole report", 30)
    _compare(scenario, report, out)
    if scenario.state:
        running.wait_state(scenario.state, seconds=30)


def _refused(scenario: Scenario, running: Daemon, out: Outcome) -> None:
    """The pre-flight stands in front of every start: nothing is spawned, the holder is named."""
    view = running.wait_state("backoff", "failed", seconds=_STALL_S)
    reason = str(view.get("reason", ""))
    out.summary = reason
    out.got = scenario.kind if scenario.says in reason else "no reason"
    out.action = scenario.action
    if out.got != scenario.kind:
        out.wrong.append(f"it says {reason!r}")


def _watch(scenario: Scenario, running: Daemon, out: Outcome) -> None:
    """Nothing may be said, and it must still be the first incarnation."""
    until = time.monotonic() + scenario.watch
    while time.monotonic() < until:
        stalls = running.stalls()
        if stalls:
            report = running.report(stalls[0]["id"])
            _note(report, out)
            out.wrong.append("a verdict came")
            return
        time.sleep(0.1)
    view = running.engine()
    out.got = "no verdict"
    if view.get("incarnation") != 1 or view.get("state") not in ("ready", "starting"):
        out.wrong.append(f"it is {view.get('state')}, incarnation {view.get('incarnation')}")


def _whole(running: Daemon, stall: str) -> dict[str, Any] | None:
    report = running.report(stall)
    texts = [row["text"] for row in report["timeline"]]
    done = report["action"] == "alert" or any(
        "tree gone" in text or "survived SIGKILL" in text for text in texts
    )
    return report if done else None


def _note(report: dict[str, Any], out: Outcome) -> None:
    culprit = report["culprit"]
    out.got = report["kind"]
    out.culprit = culprit["lane"] or culprit["process"]
    out.confidence = report["confidence"]
    out.action = report["action"]
    out.summary = report["summary"]
    if report["limit_s"] > 0:
        out.late_s = round(report["elapsed_s"] - report["limit_s"], 3)


def _compare(scenario: Scenario, report: dict[str, Any], out: Outcome) -> None:
    _note(report, out)
    if scenario.kind == "UNKILLABLE" and scenario.kind in report["kinds"]:
        out.got = (
            scenario.kind
        )  # known only after the kill: it stands beside the kind that was told
    wanted = scenario.culprit.format(odd=out.seed % max(1, scenario.ranks))
    if out.got != scenario.kind:
        sure = " with high confidence" if out.confidence == "high" else ""
        out.wrong.append(f"kind {out.got}{sure}")
    if not _fits(out.culprit, wanted):
        out.wrong.append(f"culprit {out.culprit or 'nobody'}, not {wanted or 'nobody'}")
    if out.action != scenario.action:
        out.wrong.append(f"action {out.action}, not {scenario.action}")
    edges = [[e["waiter"], e["target"]] for e in report["wait_graph"]["edges"]]
    if any(edge not in edges for edge in scenario.edges):
        out.wrong.append(f"edges {edges}")
    if scenario.late_s and (out.late_s is None or out.late_s > scenario.late_s):
        out.wrong.append(f"{out.late_s} s late")


def _fits(got: str, wanted: str) -> bool:
    return got == wanted or (bool(wanted) and fnmatch.fnmatchcase(got, wanted))
