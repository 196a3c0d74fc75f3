"""The [gateway] table, the flags that the daemon makes of it, and the commands that take them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
from click.testing import CliRunner

from stallwatch.board.create import BoardFolder
from stallwatch.board.reader import BoardReader
from stallwatch.cli import gateway as command
from stallwatch.cli.main import main
from stallwatch.cli.serve import configure
from stallwatch.clock import SystemClock
from stallwatch.config.gateway import GatewayConfig
from stallwatch.config.load import build
from stallwatch.control.gateway import GatewayCollector, GatewayReport
from stallwatch.daemon.gateway import GatewayDesk, as_engine
from stallwatch.errors import ConfigError
from stallwatch.gateway.main import bind
from stallwatch.gateway.options import Options
from stallwatch.testing.clock import FakeClock
from stallwatch.watch import limits

TABLE = {
    "listen": "127.0.0.1:8123",
    "engines": ["chat"],
    "upstreams": {"chat": "unix:/run/chat.sock"},
    "hold": "90s",
    "hold_most": 7,
    "retry": "before-first-byte",
    "max_in_flight": 5,
    "max_connections": 6,
    "deadline": "1m30s",
    "slow_client": "250ms",
    "drain": "3s",
    "limits": {"first_token": "1s", "between_tokens": "2s", "whole_answer": "3s"},
}
WANTED = Options(
    listen="127.0.0.1:8123", engines=("chat",), upstreams={"chat": "unix:/run/chat.sock"},
    hold=90.0, hold_most=7, retry="before-first-byte", max_in_flight=5, max_connections=6,
    deadline=90.0, first_token=1.0, between_tokens=2.0, whole_answer=3.0, slow_client=0.25,
    drain=3.0,
)  # fmt: skip


def config(table):
    engines = {"chat": {"command": ["x"], "port": 8001}}
    return build({"engines": engines, "gateway": table}, source="f.toml")


@pytest.fixture
def started(monkeypatch):
    """What `stallwatch gateway` would run."""
    seen = []
    monkeypatch.setattr(
        "stallwatch.gateway.main.run", lambda options, **to: seen.append((options, to))
    )
    return seen


def test_the_table_becomes_the_options():
    """Every key arrives, durations in seconds."""
    found = config(TABLE).gateway
    assert found is not None
    assert found.options() == WANTED


def test_the_daemons_flags_say_the_same_as_the_table(started):
    """The command that the daemon starts is read back to the same options, and to its own socket."""
    found = config(TABLE).gateway
    assert found is not None
    argv = as_engine(found, "/s/control.sock").command
    assert main(argv[argv.index("gateway") :]) == 0
    assert started == [(WANTED, {"url": "", "control": "/s/control.sock", "token": ""})]


def test_flags_stand_over_the_file(started, tmp_path):
    """-c FILE gives the table, a flag beside it wins."""
    file = tmp_path / "s.toml"
    file.write_text(
        '[engines.chat]\ncommand = ["x"]\nport = 8001\n[gateway]\nhold = "5s"\ndrain = "6s"\n'
    )
    assert main(["gateway", "-c", str(file), "--hold", "7s", "--socket", "/s"]) == 0
    options = started[0][0]
    assert (options.hold, options.drain) == (7.0, 6.0)


@pytest.mark.parametrize(
    "flags",
    [["--hold", "5"], ["--upstream", "chat"], ["--listen", "nowhere"], ["--first-token", "0s"]],
)
def test_flags_that_cannot_be_meant_are_78(started, flags, capsys):
    """Exit 78 with a sentence; nothing listens."""
    assert main(["gateway", *flags]) == 78
    assert started == []
    assert capsys.readouterr().err.startswith("stallwatch: ")


def test_serve_takes_the_gateway_as_a_flag():
    """--gateway alone is the default address; the engine keeps its own port."""
    found = configure(None, None, ("x", "--port", "8001"), {"gateway": "127.0.0.1:8000"})
    assert found.gateway is not None
    assert found.gateway.options() == Options()


def test_help_names_every_key():
    """What the table knows, the command's help shows."""
    shown = CliRunner().invoke(command.gateway, ["--help"]).output
    for key in ("hold", "retry", "max-in-flight", "first-token", "between-tokens", "whole-answer"):
        assert f"--{key}" in shown


def test_a_taken_port_is_an_error_that_says_so():
    """ConfigError with the address, not a traceback."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        where = f"127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(ConfigError, match=where):
            bind(where)


@pytest.mark.process
@pytest.mark.slow
def test_the_gateway_is_on_the_board_before_it_listens(tmp_path):
    """Who sees its port sees its lane: even one that gets no port had attached before."""
    folder = BoardFolder.create(tmp_path, engine="gateway", incarnation=1)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        where = f"127.0.0.1:{held.getsockname()[1]}"
        ended = subprocess.run(
            [sys.executable, "-m", "stallwatch.cli.main", "gateway", "--listen", where],
            env={**os.environ, **folder.environment()}, capture_output=True, text=True,
            timeout=20, check=False,
        )  # fmt: skip

    assert ended.returncode == 78
    image = BoardReader(folder.path).look(SystemClock())
    assert image is not None
    assert [p.address for p in image.processes] == ["gateway:0"]


def test_a_unix_socket_is_private_and_a_dead_ones_place_is_taken(tmp_path):
    """0600; a second gateway is refused while the first listens, and takes its place afterwards."""
    where = f"unix:{tmp_path}/s"
    with bind(where):
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
        with pytest.raises(ConfigError, match="already"):
            bind(where)
    bind(where).close()


def test_counts_are_metrics():
    """Known ends begin at 0; what was reported is shown."""
    desk = GatewayDesk(FakeClock())
    desk.heard(GatewayReport(in_flight=3, totals={"requests": 9, "failed": 2, "answered": 4}))
    found = {
        (s.name, s.labels.get("end", "")): s.value
        for family in GatewayCollector(desk).collect()
        for s in family.samples
    }
    assert found["stallwatch_gateway_requests_total", "failed"] == 2
    assert found["stallwatch_gateway_requests_total", "broken"] == 0
    assert found["stallwatch_gateway_in_flight", ""] == 3
    assert ("stallwatch_gateway_requests_total", "requests") not in found


def test_a_gateway_that_is_slow_is_not_restarted():
    """Its policy restarts whatever kind: a decay is therefore never called."""
    policy = limits.build(as_engine(GatewayConfig(), "/s/control.sock").limits)
    assert policy.degraded_ns > 365 * 86400 * 10**9
