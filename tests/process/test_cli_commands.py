"""Real commands against a real server."""

from __future__ import annotations

import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from control_helpers import STALL, TOKEN, Running, serving
from stallwatch.control.service import Liveness, ProcessView
from stallwatch.lifecycle.states import State
from stallwatch.testing.service import FakeService, engine_view, stall_report

pytestmark = [pytest.mark.process, pytest.mark.http]

ROOT = Path(__file__).parents[2]
SECOND = "st-20261130T041502Z-00000001"


def environment(**more: str) -> dict[str, str]:
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("STALLWATCH", "XDG", "PYTEST"))
    }
    return {**kept, "PYTHONPATH": str(ROOT / "supervisor"), **more}


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "stallwatch.cli.main", *map(str, args)]


def cli(*args: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*args),
        env=env or environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    (folder / "stacks-0.json").write_text("{}")
    service = FakeService(
        [
            engine_view(last_stall=STALL),
            engine_view("code", State.EXHAUSTED, reason="5 restarts in 30m"),
        ]
    )
    service.reports[STALL] = stall_report(STALL)
    service.reports[SECOND] = stall_report(SECOND, "code", "GIL_HELD")
    service.files[STALL] = [f"{folder}/stacks-0.json"]
    service.lines = ["loading\x1b[31m shard 1", "a\tb"]
    service.emit("state", "ready")
    service.emit("stall", "GIL\x07_HELD", engine="code")
    with serving(folder, service) as found:
        yield found


@pytest.fixture
def alone(tmp_path):
    """A server of its own, for tests that make events."""
    with serving(tmp_path) as found:
        found.service.emit("state", "ready")
        found.service.emit("state", "again")
        yield found


@pytest.fixture
def at(running: Running):
    """Run a command against the server over its socket."""
    return lambda *args: cli(*args, "--socket", running.path)


def test_status(at):
    """The first screen: headline, table, recent stalls on stdout; the hint on stderr."""
    found = at("status")
    lines = found.stdout.splitlines()

    assert found.returncode == 0
    assert lines[0] == "code is EXHAUSTED: 5 restarts in 30m"
    assert lines[2].split() == ["NAME", "STATE", "READY", "RESTARTS", "LAST-STALL", "PID", "AGE"]
    assert lines[3].split() == ["chat", "ready", "yes", "0/5", "9f2c41aa", "4242", "3m12s"]
    assert "Recent stalls" in lines
    assert max(map(len, lines)) <= 80
    assert "stallwatch restart code" in found.stderr


def test_status_without_stalls(tmp_path):
    """No stalls is said, not shown as nothing; -q leaves out the hint."""
    with serving(tmp_path) as running:
        found = cli("-q", "status", "--socket", running.path)
    assert "Recent stalls: (none)" in found.stdout
    assert found.stderr == ""


@pytest.mark.slow
def test_status_tells_that_reports_are_in_memory_only(tmp_path):
    """One line with the reason, and what will be lost; the exit code stays."""
    with serving(tmp_path) as running:
        running.service.live = Liveness(live=True, reports="/srv/state is full")
        found = cli("status", "--socket", running.path)
    assert found.returncode == 0
    words = "reports are kept in memory only (/srv/state is full): they end with the daemon"
    assert f"warning: {words}" in found.stderr.splitlines()


@pytest.mark.slow
def test_status_forms(at):
    """-o json is the API's objects, -o name is names, --check is exit 3 unless all are ready."""
    found = json.loads(at("status", "-o", "json").stdout)

    assert [e["name"] for e in found["engines"]] == ["chat", "code"]
    assert at("status", "-o", "name").stdout == "chat\ncode\n"
    assert at("status", "--check").returncode == 3
    assert at("status", "chat", "--check").returncode == 0


def test_describe(at):
    """One engine with processes, lanes and its events."""
    found = at("describe", "chat").stdout

    assert "worker:0/model" in found
    assert "step=118" in found
    assert "ready" in found.splitlines()[1]
    assert max(map(len, found.splitlines())) <= 90
    assert json.loads(at("describe", "chat", "-o", "json").stdout)["name"] == "chat"


def test_describe_a_plain_engine(tmp_path):
    """No lanes is explained, a member that never attached is not "not ready", events are whole."""
    member = ProcessView("pid:7", 7, "S", ready=False, pending=0, attached=False)
    service = FakeService([engine_view(processes=(member,), lanes=())])
    for number in range(1200):
        service.emit("log", f"number {number}")
    service.emit("paused", "limits of engine chat rest for 600 s, asked for by me")
    service.emit("log", "y" * 200)
    with serving(tmp_path, service) as running:
        found = cli("describe", "chat", "--socket", running.path).stdout
        service.emit("paused", "the pause is over: limits as before")
        later = cli("describe", "chat", "--socket", running.path).stdout
        names = cli("describe", "chat", "-o", "name", "--socket", running.path).stdout

    assert "no lanes: this engine sends no heartbeats" in found
    assert next(x for x in found.splitlines() if x.startswith("pid:7")).split()[3] == "-"
    assert "y" * 200 in found
    assert "number 1199" in found
    assert "Pause: limits of engine chat rest for 600 s" in found
    assert "Pause:" not in later
    assert names == "chat\n"


@pytest.mark.slow
def test_unknown_names_are_4(at):
    """No such engine or stall is exit 4, with the names that exist."""
    for line in (("describe", "nope"), ("logs", "nope"), ("restart", "nope"), ("events", "nope")):
        found = at(*line)
        assert found.returncode == 4
        assert "engines: chat, code" in found.stderr
    assert at("show", "st-20261130T031502Z-00000000").returncode == 4
    assert at("show", "../../etc/passwd").returncode == 4
    assert at("describe", "../stalls").returncode == 4


@pytest.mark.slow
def test_stalls_and_show(at):
    """The list is newest first; show takes an id, its last digits, or `last`."""
    assert at("stalls", "-o", "name").stdout.splitlines() == [SECOND, STALL]
    for ident in (STALL, "9f2c41aa", "41aa"):
        assert json.loads(at("show", ident, "-o", "json").stdout)["id"] == STALL
    assert json.loads(at("show", "last", "-o", "json").stdout)["id"] == SECOND
    text = at("show", STALL)
    assert text.returncode == 0
    assert "DEVICE_WAIT" in text.stdout


@pytest.mark.slow
def test_dump(at, tmp_path):
    """A folder with report and files, private; an existing one is never touched."""
    folder = tmp_path / "out"
    found = at("dump", STALL, "-o", folder)

    assert found.returncode == 0
    assert found.stdout == f"{folder}/{STALL}\n"
    assert sorted(p.name for p in (folder / STALL).iterdir()) == [
        "report.json",
        "report.txt",
        "stacks-0.json",
    ]
    assert (folder / STALL).stat().st_mode & 0o777 == 0o700
    assert (folder / STALL / "report.json").stat().st_mode & 0o777 == 0o600
    (folder / STALL / "report.json").write_text("mine")
    again = at("dump", STALL, "-o", folder)
    assert again.returncode == 1
    assert "not overwritten" in again.stderr
    everything = at("dump", "--all", "-o", folder)
    assert everything.stdout == f"{folder}/{SECOND}\n"
    assert (folder / STALL / "report.json").read_text() == "mine"


@pytest.mark.slow
def test_logs_and_events_cannot_drive_the_terminal(at):
    """Control characters of an engine are blanks on the terminal."""
    assert at("logs", "chat").stdout == "loading [31m shard 1\na       b\n"
    found = at("events").stdout
    assert "\x07" not in found
    assert "GIL _HELD" in found
    assert json.loads(at("events", "chat", "-o", "json").stdout)["items"][0]["id"] == 1


@pytest.mark.slow
def test_verbs(at, running: Running):
    """A verb prints what happened, and the service was asked once."""
    running.service.asked.clear()

    assert at("restart", "chat").stdout == "chat restarts: incarnation 2 is being started\n"
    assert at("drain", "chat", "-o", "name").stdout == "chat\n"
    assert at("pause", "chat", "--for", "1m30s").returncode == 0
    assert [each[:2] for each in running.service.asked] == [
        ("restart", "chat"),
        ("drain", "chat"),
        ("pause", "chat"),
    ]
    assert running.service.asked[2][2] == 90.0


@pytest.mark.slow
def test_stacks(at):
    """Stacks are taken now, merged for people and whole for programs."""
    assert "wait (threading.py:320)" in at("stacks", "chat", "-o", "wide").stdout
    assert (
        json.loads(at("stacks", "chat", "--native", "-o", "json").stdout)["rung"] == "py-spy-native"
    )
    assert at("stacks", "chat").returncode == 0


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        (("wait", "chat", "--for=ready"), 0, ""),
        (("wait", "chat", "--for=stopped", "--timeout=0.3s"), 124, "is ready, not stopped"),
        (("wait", "code", "--for=ready"), 3, "will not become ready: 5 restarts"),
        (("wait", "code", "--for=stalled"), 0, ""),
        (("wait", "nope"), 4, "no engine"),
    ],
)
def test_wait(at, line, code, says):
    """0: it is so; 124: not in time; 3: it cannot become so; 4: no such engine."""
    found = at(*line)

    assert found.returncode == code
    assert says in found.stderr


@pytest.mark.slow
def test_wait_sees_a_change(tmp_path):
    """A wait that began before the state ends with it, and one for a stall with a new id."""
    with serving(tmp_path, FakeService([engine_view(state=State.STARTING)])) as running:
        asked = threading.Event()
        running.service.before = lambda name: asked.set() if name == "engine" else None
        child = subprocess.Popen(
            command("wait", "chat", "--timeout=20s", "--socket", running.path),
            env=environment(), stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        with child:
            assert asked.wait(10)
            running.service.set(engine_view())
            assert child.communicate(timeout=10)[0] == "chat ready\n"
    assert child.returncode == 0


@pytest.mark.slow
def test_wait_lasts_through_a_failure_that_is_restarted(tmp_path):
    """FAILED with a tree is on its way to a restart: the wait goes on until READY."""
    with serving(tmp_path, FakeService([engine_view(state=State.FAILED, up=True)])) as running:
        looks: queue.Queue[str] = queue.Queue()
        running.service.before = looks.put
        child = subprocess.Popen(
            command("wait", "chat", "--timeout=20s", "--socket", running.path),
            env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        with child:
            for _ in range(3):
                looks.get(timeout=10)
            running.service.set(engine_view())
            assert child.communicate(timeout=10) == ("chat ready\n", "")
    assert child.returncode == 0


@pytest.mark.slow
def test_wait_ends_when_a_failure_is_final(tmp_path):
    """FAILED without a tree and not to be restarted: exit 3, and the sentence is true."""
    with serving(tmp_path, FakeService([engine_view(state=State.FAILED)])) as running:
        found = cli("wait", "chat", "--timeout=20s", "--socket", running.path)

    assert found.returncode == 3
    assert "chat is failed and will not become ready" in found.stderr


@pytest.mark.slow
def test_no_daemon_is_5(tmp_path):
    """Nobody there is exit 5: where we looked, and what to do."""
    found = cli("status", "--socket", tmp_path / "none.sock")

    assert found.returncode == 5
    assert "none.sock: no such file" in found.stderr
    assert "stallwatch serve" in found.stderr
    assert cli("wait", "x", "--timeout=0.1s", "--socket", tmp_path / "none").returncode == 5


def test_a_wait_without_a_daemon_says_so_at_once(tmp_path):
    """Before the time is over, stderr says that nobody answers and for how long it waits."""
    child = subprocess.Popen(
        command("wait", "chat", "--timeout=30s", "--socket", tmp_path / "none.sock"),
        env=environment(), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with child:
        assert child.stderr is not None
        said = child.stderr.readline() + child.stderr.readline()
        child.kill()
    assert "none.sock" in said
    assert "waiting up to 30 s for one, then for chat" in said


def test_a_foreign_server_is_said(running: Running):
    """What answers without being us is named as such."""
    found = cli("status", "--url", f"http://{running.server.health_address}")

    assert found.returncode == 1
    assert "Not Found" in found.stderr or "no stallwatch" in found.stderr


def test_a_server_without_json_is_said():
    """A program that answers 200 with something else is named as foreign, not a crash."""

    class Plain(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Plain) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        found = cli("status", "--url", f"http://127.0.0.1:{server.server_port}")
        thread.join(10)
    assert found.returncode == 1
    assert "is no stallwatch" in found.stderr


@pytest.mark.slow
def test_over_tcp(running: Running, tmp_path):
    """Reads need nothing on loopback; a verb needs the token, from a variable or a file."""
    url = f"http://{running.server.control_address}"
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)

    assert cli("status", "--url", url).returncode == 0
    refused = cli("restart", "chat", "--url", url)
    assert refused.returncode == 1
    assert "STALLWATCH_TOKEN" in refused.stderr
    env = environment(STALLWATCH_TOKEN=TOKEN, STALLWATCH_URL=url)
    assert cli("restart", "chat", env=env).returncode == 0
    assert cli("restart", "chat", "--url", url, "--token-file", file).returncode == 0


def test_finds_the_socket_by_itself(tmp_path):
    """A daemon in the user's runtime directory is found without a flag."""
    (tmp_path / "stallwatch").mkdir()
    with serving(tmp_path / "stallwatch"):
        found = cli("status", "-o", "name", env=environment(XDG_RUNTIME_DIR=str(tmp_path)))
    assert (found.stdout, found.returncode) == ("chat\n", 0)


@pytest.mark.slow
def test_follow_until_interrupted(alone: Running):
    """events -f prints what happens as JSON lines and ends with 130 on Ctrl-C, quietly."""
    child = subprocess.Popen(
        # A background job of a shell has SIGINT ignored, and hands that down.
        ["env", "--default-signal=INT", *command("events", "-f", "-o", "json", "--socket", alone.path)],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert json.loads(child.stdout.readline())["id"] == 1
        child.stdout.readline()
        alone.service.emit("state", "followed")
        assert json.loads(child.stdout.readline())["message"] == "followed"
        child.send_signal(signal.SIGINT)
        assert child.wait(10) == 130
        assert "Traceback" not in child.stderr.read()


@pytest.mark.slow
def test_a_closed_pipe_is_quiet(alone: Running):
    """A reader that leaves early ends the command without a word."""
    child = subprocess.Popen(
        command("events", "-f", "-o", "json", "--socket", alone.path),
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.readline()
        child.stdout.close()
        until = time.monotonic() + 15
        while child.poll() is None and time.monotonic() < until:
            alone.service.emit("log", "x" * 5000)
        assert child.wait(1) == 141
        assert child.stderr.read() == ""


@pytest.mark.slow
def test_doctor(running: Running):
    """doctor ends in bounded time with a line per check, or the same as JSON."""
    found = cli("doctor")
    checks = json.loads(cli("doctor", "-o", "json").stdout)["checks"]

    assert found.returncode in (0, 1)
    assert {line[:6].strip() for line in found.stdout.splitlines() if line.startswith("[")} <= {
        "[ok]", "[warn]", "[fail]",
    }  # fmt: skip
    assert len(checks) == 12
    assert all(check["remedy"] for check in checks if check["level"] != "ok")


HEAVY = (
    "fastapi",
    "pydantic",
    "structlog",
    "rich",
    "asyncio",
    "uvicorn",
    "prometheus_client",
    "psutil",
)


@pytest.mark.parametrize(
    "line", [["version"], ["--help"], ["status", "--help"], ["serve", "--help"]]
)
def test_start_up_imports_nothing_heavy(line):
    """No command imports the daemon's libraries to say what it is."""
    code = f"import sys; from stallwatch.cli.main import main; main({line!r}); print(sorted(sys.modules))"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert found.returncode == 0
    assert not [name for name in HEAVY if f"'{name}'" in found.stdout]


def test_a_client_command_imports_nothing_heavy(running: Running):
    """Even a command that talks to the daemon stays light."""
    code = (
        "import sys; from stallwatch.cli.main import main; "
        f"main(['status', '--socket', {running.path!r}]); print(sorted(sys.modules))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert "'stallwatch.cli.status'" in found.stdout
    assert not [name for name in HEAVY if f"'{name}'" in found.stdout]


@pytest.mark.slow
def test_start_up_time():
    """`version` costs at most 150 ms more than Python itself (median; twice that on a busy machine)."""

    def median(line: list[str]) -> float:
        took = []
        for _ in range(7):
            started = time.perf_counter()
            subprocess.run(
                line, env=environment(), stdout=subprocess.DEVNULL, timeout=30, check=False
            )
            took.append(time.perf_counter() - started)
        return statistics.median(took)

    bare = median([sys.executable, "-c", "pass"])
    assert median(command("version")) - bare < max(0.15, 10 * bare)


@pytest.mark.slow
def test_a_dump_is_whole_or_nothing(running: Running, tmp_path):
    """A refused dump leaves nothing behind, names the socket that helps, and the retry works."""
    url = f"http://{running.server.control_address}"
    folder = tmp_path / "a" / "b"
    refused = cli("dump", STALL, "-o", folder, "--url", url)

    assert refused.returncode == 1
    assert running.path in refused.stderr
    assert list(tmp_path.iterdir()) == []
    assert cli("dump", STALL, "-o", folder, "--socket", running.path).returncode == 0
    assert [p.name for p in folder.iterdir()] == [STALL]


def test_a_dump_that_breaks_off_leaves_nothing(monkeypatch, tmp_path):
    """A file that cannot be had takes the half folder with it, and the folders made for it."""
    from stallwatch.cli import dump
    from stallwatch.errors import StallwatchError

    class Broken:
        def report(self, _):
            return stall_report(STALL)

        def files(self, _):
            return ["a", "b"]

        def content(self, _, name):
            if name == "b":
                raise StallwatchError("gone")
            return b"x"

    with pytest.raises(StallwatchError, match="gone"):
        dump._write(Broken(), STALL, f"{tmp_path}/new/{STALL}")
    assert list(tmp_path.iterdir()) == []


def test_a_state_dir_asks_its_own_daemon(tmp_path):
    """--state-dir prefers the daemon whose socket lies there to the ledger, whatever else runs."""
    service = FakeService()
    service.reports[STALL] = stall_report(STALL)
    env = environment(STALLWATCH_SOCKET="/nonexistent/other.sock")
    with serving(tmp_path, service):
        found = cli("stalls", "-o", "name", "--state-dir", tmp_path, env=env)
    assert (found.stdout, found.stderr, found.returncode) == (f"{STALL}\n", "", 0)
