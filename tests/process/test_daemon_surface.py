"""The daemon at its borders: ports, arguments, debuggers, signals, systemd, a stderr nobody reads."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon_helpers import ENGINES, Daemon, daemon, gone, place, request, until

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.fixture
def folder() -> Iterator[Path]:
    with place() as path:
        yield path


def test_arguments_with_braces_reach_the_engine_untouched(folder):
    """Only {port}, {name}, {incarnation} and {run_dir} are replaced; JSON passes byte for byte."""
    given = '{"a": {"b": [1, 2]}, "c": "{x}", "d": "{}"}'
    command = [
        sys.executable,
        ENGINES,
        "argv",
        str(folder),
        given,
        "{name}-{incarnation}",
        "{port}",
    ]
    with daemon(folder, {"command": command, "ready": {"http": ""}}) as run:
        expected = repr([given, f"{run.name}-1", str(run.port)])
        run.wait(lambda: f"ARGV {expected}" in run.log(), "the engine's arguments")


def test_a_strangers_answer_on_the_port_is_not_ready(folder):
    """Somebody else listens first: the engine is not READY by it, and the reason names the pid."""
    settings = {"command": [sys.executable, ENGINES, "sleeper", str(folder)]}
    with daemon(folder, settings) as run:
        run.wait(lambda: list(folder.glob("sleeper.*")), "the engine lives")
        with socket.socket() as mine:
            mine.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            mine.bind(("127.0.0.1", run.port))
            mine.listen()
            words = f"port {run.port} is answered by pid {os.getpid()}"
            run.wait(lambda: run.said(words), "the stranger named")
            assert run.engine()["state"] == "starting"
            assert words in run.engine()["reason"]
            assert run.get("/readyz")[0] == 503


@pytest.mark.skipif(shutil.which("gdb") is None, reason="gdb is not installed")
def test_a_debugger_suspends_the_limits_until_it_lets_go(folder):
    """A worker under gdb is no stall, however late; after the detach it becomes one."""
    with daemon(folder) as run:
        run.wait_ready()
        pid = run.pid("worker:0")
        script = ["-ex", "set pagination off", "-ex", "shell cat", "-ex", "detach", "-ex", "quit"]
        gdb = subprocess.Popen(
            ["gdb", "-nx", "-q", "-batch", "-ex", f"attach {pid}", *script],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            run.wait(lambda: any(e["type"] == "debugger" for e in run.events()), "gdb was seen")
            late = run.engine()["lanes"]
            # The whole process is stopped by gdb, and its lanes grow older than twice their limit.
            run.wait(
                lambda: all(x["age_s"] > 2.5 for x in run.engine()["lanes"] if x["pid"] == pid),
                "the worker's lane is late",
            )
            assert late
            assert run.stalls() == []
            run.order("worker", "stall")
            gdb.communicate(timeout=20)
            report = run.wait_stall()
            assert report["culprit"]["lane"] == "worker:0/model"
            run.wait_ready(2)
        finally:
            gdb.kill()
            gdb.communicate()


def test_sighup_takes_limits_and_refuses_everything_else_by_name(folder):
    """A raised limit is in force after SIGHUP; a changed command is refused and nothing changes."""
    with daemon(folder) as run:
        run.wait_ready()
        run.engine_config["limits"]["default"] = "7s"
        run.write()
        run.process.send_signal(signal.SIGHUP)
        run.wait(lambda: run.said("limits and policies re-read"), "the reload")
        run.order("worker", "stall")

        def limit() -> float:
            lanes = run.engine()["lanes"]
            return next((x["limit_s"] for x in lanes if x["phase"] == "execute_model"), 0.0)

        run.wait(lambda: limit() == 7.0, "the new limit")
        run.release()
        run.engine_config["command"] = ["true"]
        run.write()
        run.process.send_signal(signal.SIGHUP)
        run.wait(lambda: run.said("command changed"), "the refusal, by name")
        run.file.write_text("nonsense")
        run.process.send_signal(signal.SIGHUP)
        run.wait(lambda: run.said("no valid TOML"), "the refusal of a broken file")
        assert run.wait_ready()["incarnation"] == 1
        assert run.stalls() == []


def test_a_stderr_that_nobody_reads_stops_nobody(folder):
    """Megabytes of output into a full pipe: the engine works on, a stall is found, the end is clean."""
    read, write = os.pipe()
    try:
        with daemon(folder, stderr=write) as run:
            os.close(write)
            write = -1
            run.wait_ready()
            run.order("api", "print20000")
            run.wait(lambda: not (folder / "api.order").exists(), "the order was taken")
            run.wait(lambda: run.engine()["log_dropped"] > 0, "output was dropped and counted")
            run.order("worker", "stall")
            run.wait_stall()
            run.wait_ready(2)
            assert run.get("/livez")[0] == 200
            assert run.stop() == 0
    finally:
        os.close(read)
        if write >= 0:
            os.close(write)


def ask(port: int) -> tuple[threading.Thread, list]:
    """One request that lasts until it is released."""
    answers: list = []
    thread = threading.Thread(
        target=lambda: answers.append(request("POST", port, "/generate", 30.0)), daemon=True
    )
    thread.start()
    return thread, answers


def pending(run: Daemon) -> int:
    return sum(p["pending"] for p in run.engine().get("processes", ()))


def test_requests_in_flight_are_answered_before_the_stop(folder):
    """SIGTERM drains: the stop waits for the answer, then ends the engine; exit status 0."""
    with daemon(folder, {"drain": "20s", "limits": {"default": "30s"}}) as run:
        run.wait_ready()
        members = run.members()
        asked = [ask(run.port) for _ in range(3)]
        run.wait(lambda: pending(run) == 3, "three requests are pending")
        run.process.send_signal(signal.SIGTERM)
        run.wait(lambda: run.engine().get("state") == "stopping", "stopping")
        assert not gone(members)
        run.release()
        for thread, answers in asked:
            thread.join(10)
            assert answers == [(200, b"served")]
        assert run.wait_exit() == 0
        assert gone(members)


def test_clients_of_a_stalled_engine_are_answered_with_the_failure(folder):
    """Those who wait get the FAILURE's id before the kill, and the report says how long it took."""
    with daemon(folder) as run:
        run.wait_ready()
        thread, answers = ask(run.port)
        run.wait(lambda: pending(run) == 1, "a request is pending")
        run.order("worker", "stall")
        report = run.wait_stall()
        thread.join(10)
        assert answers == [(503, report["id"].encode())]
        run.wait_ready(2)
        timeline = str(run.report(report["id"])["timeline"])
        assert "every waiting client answered" in timeline


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything_and_a_second_one_hurries(folder, number):
    """The first waits for the requests in flight; the second ends it at once; exit status 0."""
    with daemon(folder, {"drain": "60s", "stop_grace": "60s"}, "deaf") as run:
        run.wait_ready()
        members = run.members()
        ask(run.port)
        run.wait(lambda: pending(run) == 1, "a request is pending")
        run.process.send_signal(number)
        run.wait(lambda: run.engine().get("state") == "stopping", "stopping")
        run.process.send_signal(number)
        assert run.wait_exit(10) == 0
        assert gone(members)


def test_a_drain_ends_with_stopped_and_a_restart_begins_anew(folder):
    """`drain` lets requests end and stops the engine for good; only `restart` starts it again."""
    with daemon(folder, {"drain": "20s", "limits": {"default": "30s"}}) as run:
        run.wait_ready()
        thread, answers = ask(run.port)
        run.wait(lambda: pending(run) == 1, "a request is pending")
        assert run.cli("drain", run.name).returncode == 0
        run.wait_state("draining")
        assert run.get("/readyz")[0] == 503
        run.release()
        thread.join(10)
        assert answers == [(200, b"served")]
        run.wait_state("stopped")
        assert run.stalls() == []
        assert run.cli("restart", run.name).returncode == 0
        run.wait_ready(2)


class Systemd:
    """The receiving end of sd_notify."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.settimeout(0.2)
        self.seen: list[tuple[float, str]] = []

    def wait(self, word: str, seconds: float = 20.0) -> float:
        """When the word came; everything before it is kept."""

        def came() -> float:
            with contextlib.suppress(TimeoutError):
                self.seen.append((time.monotonic(), self.socket.recv(4096).decode()))
            return next((at for at, text in self.seen if word in text), 0.0)

        return float(until(came, seconds=seconds, what=f"{word} in {[t for _, t in self.seen]}"))

    def text(self) -> str:
        return "\n".join(text for _, text in self.seen)


def test_systemd_hears_loading_ready_watchdog_and_stopping(folder):
    """READY only with a ready engine, EXTEND before it, WATCHDOG all along, STOPPING at the end."""
    manager = Systemd(folder / "notify")
    settings = {
        "command": [sys.executable, ENGINES, "loader", str(folder)],
        "port": None,
        "limits": {"default": "30s"},
    }
    env = {"NOTIFY_SOCKET": str(folder / "notify"), "WATCHDOG_USEC": "400000"}
    try:
        with daemon(folder, settings, env=env) as run:
            manager.wait("EXTEND_TIMEOUT_USEC=")
            manager.wait("WATCHDOG=1")
            run.wait_state("starting")
            assert "READY=1" not in manager.text()
            run.release()
            manager.wait("READY=1")
            assert f"MAINPID={run.process.pid}" in manager.text()
            before = manager.text().count("WATCHDOG=1")
            environ = Path(f"/proc/{run.engine()['root_pid']}/environ").read_bytes()
            assert b"NOTIFY_SOCKET" not in environ
            until(
                lambda: manager.wait("WATCHDOG=1") and manager.text().count("WATCHDOG=1") > before,
                what="more of the watchdog",
            )
            run.process.send_signal(signal.SIGTERM)
            manager.wait("STOPPING=1")
            assert run.wait_exit() == 0
    finally:
        manager.socket.close()


def test_health_listen_answers_probes_and_metrics_and_nothing_else(folder):
    """What a kubelet may see: three probes and /metrics; engines and reports are not there."""
    from daemon_helpers import free_port

    port = free_port()
    with daemon(folder, supervisor={"health_listen": f"127.0.0.1:{port}"}) as run:
        run.wait_ready()
        for path in ("/livez", "/readyz", "/healthz", "/metrics"):
            assert request("GET", port, path)[0] == 200
        assert request("GET", port, "/v1/engines")[0] == 404
        assert str(folder).encode() not in request("GET", port, "/healthz?verbose")[1]


def test_the_journey_of_one_command_line_ends_with_0(folder):
    """`serve -- COMMAND --port N`: READY on that port; SIGINT ends it with 0 and leaves nothing."""
    from daemon_helpers import free_port

    control, port = free_port(), free_port()
    command = [sys.executable, ENGINES, "api", str(folder), str(port), "--port", str(port)]
    argv = [
        "--control",
        f"127.0.0.1:{control}",
        "--state-dir",
        str(folder / "state"),
        "--",
        *command,
    ]
    with daemon(folder, argv=argv) as run:
        run.control, run.name = control, "engine"
        view = run.wait_ready()
        assert view["port"] == port
        run.process.send_signal(signal.SIGINT)
        assert run.wait_exit() == 0


@pytest.mark.parametrize("how", ["2>&- 1>&- 0<&-", "2>/dev/full 1>/dev/full"])
def test_a_daemon_without_usable_streams_works_all_the_same(folder, how):
    """Closed or full standard streams: no file takes their numbers, a stall is handled, exit 0."""
    with daemon(folder, before=["sh", "-c", f'exec "$@" {how}', "sh"]) as run:
        run.wait_ready()
        run.order("api", "print100")
        run.order("worker", "stall")
        run.wait_stall()
        run.wait_ready(2)
        streams = [os.readlink(f"/proc/{run.process.pid}/fd/{fd}") for fd in range(3)]
        assert all(name.startswith("/dev/") for name in streams), streams
        assert run.stop() == 0


def test_a_stderr_whose_reader_went_away_is_no_reason_to_end(folder):
    """EPIPE on every line: the daemon goes on and ends with 0."""
    read, write = os.pipe()
    with daemon(folder, stderr=write) as run:
        os.close(write)
        run.wait_ready()
        os.close(read)
        run.order("worker", "stall")
        run.wait_ready(2)
        assert run.stop() == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_a_full_disk_costs_the_file_not_the_failure(folder):
    """No room in state_dir: the stall is declared, the engine restarted, the report readable."""
    state = folder / "state"
    state.mkdir()
    script = f'mount -t tmpfs -o size=400k,mode=0700 none {state} && exec "$@"'
    with daemon(folder, before=["unshare", "-m", "sh", "-c", script, "sh"]) as run:
        run.wait_ready()
        inside = f"/proc/{run.process.pid}/root{state}/fill"
        with contextlib.suppress(OSError), open(inside, "wb", buffering=0) as file:
            while file.write(b"x" * 4096):
                pass
        run.order("worker", "stall")
        report = run.wait_stall()
        run.wait_ready(2)
        assert run.report(report["id"])["kind"] == report["kind"]
        assert run.said("No space left on device")
        assert run.stop() == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_a_daemon_begins_on_a_full_disk_and_says_what_that_costs(folder):
    """No room from the start: the engine is served and restarted, reports are in memory, and so said."""
    state = folder / "state"
    state.mkdir()
    fill = f"dd if=/dev/zero of={state}/fill bs=4k 2>/dev/null"
    script = f'mount -t tmpfs -o size=400k,mode=0700 none {state} && {fill}; exec "$@"'
    with daemon(folder, before=["unshare", "-m", "sh", "-c", script, "sh"]) as run:
        run.wait_ready()
        status, said = run.get("/healthz?verbose")
        assert (status, said.splitlines()[-1]) == (200, b"ready")
        assert b"[-]reports failed: kept in memory only" in said
        shown = run.cli("status", "--url", f"http://127.0.0.1:{run.control}")
        assert "reports are kept in memory only" in shown.stderr
        run.order("worker", "stall")
        report = run.wait_stall()
        run.wait_ready(2)
        assert run.report(report["id"])["kind"] == report["kind"]
        assert run.stop() == 0
