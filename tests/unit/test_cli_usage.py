"""Usage errors, suggestions, and what the flags of `serve` mean."""

from __future__ import annotations

import json
from importlib import import_module, metadata

import click
import pytest
from click.testing import CliRunner

from stallwatch import __version__
from stallwatch.cli import serve as serve_module
from stallwatch.cli.main import COMMANDS, cli, main
from stallwatch.cli.settings import parse_seconds
from stallwatch.config import load
from stallwatch.config.load import build
from stallwatch.control.auth import Auth
from stallwatch.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in ("STALLWATCH_URL", "STALLWATCH_SOCKET", "STALLWATCH_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["stattus"], "Did you mean 'status'?"),
        (["xyzzy"], "no command 'xyzzy'"),
        (["show"], "ID"),
        (["status", "--bogus"], "--bogus"),
        (["status", "-o", "xml"], "xml"),
        (["wait", "chat", "--for", "lunch"], "lunch"),
        (["wait", "chat", "--timeout", "nan"], "duration"),
        (["serve"], "give a command after `--`"),
        (["serve", "--observe", "--enforce", "restart", "--", "x"], "contradict"),
        (["serve", "--limit", "x", "--", "y"], "PHASE=DURATION"),
        (["serve", "-c", "f", "--", "y"], "not both"),
        (["serve", "-c", "f", "--name", "n"], "--name"),
        (["dump"], "--all"),
        (["dump", "--all", "last"], "give an ID or --all, not both"),
        (["wait", "chat", "--timeout", "0s"], "'0s' is no time at all"),
        (["pause", "chat", "--for", "0s"], "'0s' is no time at all"),
        (["status", "--timeout", "0"], "'0' is no time at all"),
        (["status", "--url", "ftp://127.0.0.1"], "not an address: 'ftp://127.0.0.1'"),
        (["stalls", "--url", "http://[x"], "not an address"),
        (["logs", "chat", "-n", "0"], "range"),
    ],
)
def test_usage_errors(args, says, capsys):
    """A wrong line is exit 2, on stderr, and says which word is wrong."""
    assert main(args) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert says in found.err


EXAMPLE = {name: "" if name == "serve" else "Example: " for name in COMMANDS}


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help(name):
    """Every command explains itself with -h and an example, and exits 0."""
    found = CliRunner().invoke(cli, [name, "-h"])

    assert found.exit_code == 0, found.output
    assert "Usage:" in found.output
    assert f"\n  {EXAMPLE[name]}stallwatch {name} " in found.output


def each_command() -> dict[str, click.Command]:
    """Ours and their subcommands, as their modules make them, by what is typed for them."""
    found: dict[str, click.Command] = {}
    for name, (place, _) in COMMANDS.items():
        found[name] = getattr(import_module(f"stallwatch.cli.{place}"), name)
        below = getattr(found[name], "commands", {})
        found |= {f"{name} {sub}": command for sub, command in below.items()}
    return found


@pytest.mark.parametrize(
    "command", [pytest.param(command, id=name) for name, command in each_command().items()]
)
def test_a_command_without_the_group_has_both_help_flags(command):
    """A program that imports one command gets its help by -h and --help, and so does the group after."""
    for flag in ("-h", "--help"):
        found = CliRunner().invoke(command, [flag])
        assert found.exit_code == 0, found.output
        assert "-h, --help" in found.output
    assert "for help" in CliRunner().invoke(command, ["--no-such-flag"]).output


def test_help_lists_commands_and_exit_codes(capsys):
    """--help names every command and the exit codes, within 80 columns."""
    assert main(["--help"]) == 0
    out = capsys.readouterr().out

    assert all(f"\n  {name} " in out for name in COMMANDS)
    assert "124 wait timed out" in out
    assert max(map(len, out.splitlines())) <= 80


def test_no_arguments_is_help_on_stderr(capsys):
    """No command is a usage error that shows the help."""
    assert main([]) == 2
    assert "Commands:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "out"),
    [
        (["version"], f"stallwatch {__version__}\n"),
        (["--version"], f"stallwatch {__version__}\n"),
        (["version", "-o", "name"], f"{__version__}\n"),
        (["-o", "json", "version"], f'{{\n  "stallwatch": "{__version__}"\n}}\n'),
    ],
)
def test_version_and_flags_on_either_side(args, out, capsys):
    """A global flag works before and after the verb."""
    assert main(args) == 0
    assert capsys.readouterr().out == out


def test_an_unknown_command_is_looked_for_in_plugins(monkeypatch, capsys):
    """Entry points of stallwatch.commands are commands, and cannot replace ours."""

    class Fake:
        value = "other:thing"

        def __init__(self, name):
            self.name = name

        def load(self):
            @click.command()
            def other():
                click.echo("other ran")

            return other

    monkeypatch.setattr(metadata, "entry_points", lambda group: [Fake("bench"), Fake("version")])

    assert main(["bench"]) == 0
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"other ran\nstallwatch {__version__}\n"


def test_an_internal_error_is_one_line(monkeypatch, capsys):
    """No traceback unless -v; `serve` says 70, a client command 1."""

    def broken(*_, **__):
        raise RuntimeError("boom")

    monkeypatch.setattr(serve_module, "configure", broken)
    assert main(["serve", "--", "x"]) == 70
    err = capsys.readouterr().err
    assert "internal error: RuntimeError: boom" in err
    assert "Traceback" not in err
    assert main(["-v", "serve", "--", "x"]) == 70
    assert "Traceback" in capsys.readouterr().err


class TestServe:
    """The flags of `serve` as a configuration."""

    @pytest.fixture
    def seen(self, monkeypatch):
        """What the daemon would be given."""
        found = []
        from stallwatch import daemon

        monkeypatch.setattr(daemon, "run", lambda config: found.append(config) or 0, raising=False)
        return found

    def test_command_passes_untouched(self, seen):
        """JSON, a second -- and options of the engine reach it as they are, with or without --."""
        command = ["cmd", "--compilation-config", '{"level": 3}', "-o", "x", "--", "-c"]
        for line in (["serve", "--", *command], ["serve", *command]):
            assert main(line) == 0
        assert [list(c.engines["engine"].command) for c in seen] == [command, command]

    def test_flags(self, seen, tmp_path):
        """Each flag lands at the key of the same name."""
        line = ["serve", "--name", "chat", "--observe", "--engine-port", "8123"]
        line += ["--limit", "default=30s", "--limit", "x=1m", "--control", "127.0.0.1:1234"]
        line += ["--state-dir", str(tmp_path), "--health-listen", "127.0.0.1:1235", "--", "cmd"]
        assert main(line) == 0
        (config,) = seen
        chat = config.engines["chat"]

        assert (chat.port, chat.enforce, chat.limits) == (
            8123,
            "observe",
            {"default": 30.0, "x": 60.0},
        )
        assert config.supervisor.control == "127.0.0.1:1234"
        assert config.supervisor.health_listen == "127.0.0.1:1235"
        assert config.supervisor.state_dir == tmp_path

    def test_vllm_without_a_port(self, seen, capsys):
        """`vllm serve` without --port gets one, and that is said on stderr, unless -q."""
        assert main(["serve", "--", "vllm", "serve", "M"]) == 0
        assert "--port 8001" in capsys.readouterr().err
        assert main(["serve", "-q", "--", "vllm", "serve", "M"]) == 0
        assert capsys.readouterr().err == ""

    def test_flags_over_a_file(self, seen, tmp_path):
        """Flags win over the file, and engine flags reach every engine."""
        file = tmp_path / "s.toml"
        file.write_text(
            '[supervisor]\ncontrol = "127.0.0.1:1"\n'
            '[engines.a]\ncommand = ["x"]\nlimits = {default = "9s"}\n[engines.b]\ncommand = ["y"]\n'
        )
        assert main(["serve", "-c", str(file), "--observe", "--limit", "p=2s"]) == 0
        (config,) = seen

        assert {e.enforce for e in config.engines.values()} == {"observe"}
        assert config.engines["a"].limits == {"default": 9.0, "p": 2.0}
        assert config.supervisor.control == "127.0.0.1:1"

    @pytest.mark.parametrize(
        "line",
        [
            ["--gateway", "nowhere", "--", "x", "--port", "1"],
            ["--limit", "a=nan", "--", "x"],
            ["-c", "/no/such/file.toml"],
            ["--name", "A_B", "--", "x"],
            ["--control", "x", "--", "x"],
        ],
    )
    def test_bad_configuration_is_78(self, seen, line, capsys):
        """What cannot be meant is exit 78 with a sentence, and nothing is started."""
        assert main(["serve", *line]) == 78
        assert seen == []
        assert capsys.readouterr().err.startswith("stallwatch: ")


def test_a_duration_without_a_unit_is_seconds_and_the_help_says_so(capsys):
    """`pause --for 10` is ten seconds on every command line, as docs/cli.md says."""
    assert parse_seconds("10") == 10.0
    assert main(["pause", "--help"]) == 0
    assert "10 is seconds" in " ".join(capsys.readouterr().out.split())


def test_config_check_and_show(tmp_path, capsys):
    """`config check` says good or 78; `config show` prints every key in force."""
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    good.write_text('[engines.a]\ncommand = ["x"]\n')
    bad.write_text('[engines.a]\ncomand = ["x"]\n')

    assert main(["config", "check", str(good)]) == 0
    assert main(["config", "check", str(bad)]) == 78
    assert "command" in capsys.readouterr().err
    assert main(["config", "show", str(good)]) == 0
    assert "engines.a.restart.budget: 5" in capsys.readouterr().out


def test_config_check_tells_a_likely_slip_and_takes_the_file(tmp_path, capsys):
    """Any name may be a phase's: a remark on stderr and in the JSON, exit 0."""
    file = tmp_path / "s.toml"
    file.write_text('[engines.a]\ncommand = ["x"]\nlimits = {defaul = "10s"}\n')
    assert main(["config", "check", str(file)]) == 0
    said = capsys.readouterr().err
    assert "warning: [engines.a.limits] 'defaul'" in said
    assert "did you mean 'default'?" in said
    assert main(["config", "check", str(file), "-o", "json"]) == 0
    (warning,) = json.loads(capsys.readouterr().out)["warnings"]
    assert "'default'" in warning


@pytest.mark.parametrize("control", ["0.0.0.0:9470", "[::]:9470", "192.0.2.7:9470"])
def test_config_check_refuses_an_address_that_serve_refuses(tmp_path, capsys, monkeypatch, control):
    """Open to other machines and no token: serve's own sentence and exit code; with one it is good."""
    monkeypatch.delenv("STALLWATCH_TOKEN", raising=False)
    file = tmp_path / "s.toml"
    table = f'[supervisor]\ncontrol = "{control}"\n'
    engine = '[engines.a]\ncommand = ["x"]\n'
    file.write_text(table + engine)
    with pytest.raises(ConfigError) as serve:
        Auth.for_address(control)

    assert main(["config", "check", str(file)]) == 78
    assert capsys.readouterr().err == f"stallwatch: {serve.value}\n"
    monkeypatch.setenv("STALLWATCH_TOKEN", "a-token-that-is-long-enough")
    assert main(["config", "check", str(file)]) == 0
    monkeypatch.delenv("STALLWATCH_TOKEN")
    file.write_text(f'{table}token_file = "/run/secrets/on-the-server"\n{engine}')
    assert main(["config", "check", str(file)]) == 0


def test_config_show_is_what_is_in_force(tmp_path, capsys, monkeypatch):
    """Defaults are shown by value, empty keys too, and durations as a file would hold them."""
    monkeypatch.setenv("STATE_DIRECTORY", "/somewhere")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    file = tmp_path / "s.toml"
    file.write_text(
        '[engines.a]\ncommand = ["x"]\ndrain = "0s"\n'
        'limits = {prefill = "90s", own = "1234567.25s", tiny = "0.00001s"}\n'
    )
    assert main(["config", "show", str(file)]) == 0
    lines = {line.strip() for line in capsys.readouterr().out.splitlines()}

    assert lines >= {
        "supervisor.health_listen: -",
        "supervisor.state_dir: /somewhere",
        "supervisor.socket: /somewhere/control.sock",
        "supervisor.exit_when: never",
        "supervisor.period: 100ms",
        "supervisor.chaos: false",
        "engines.a.env: -",
        "engines.a.limits.default: 1m",
        "engines.a.limits.compile: 30m",
        "engines.a.limits.prefill: 1m30s",
        "engines.a.limits.own: 1234567.25s",
        'engines.a.restart.backoff: ["1s", "5s", "15s", "1m", "2m"]',
    }
    assert main(["config", "show", str(file), "-o", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    source = shown.pop("source")
    again = build(shown, source=source)
    first = load(file)
    assert again.engines["a"].restart == first.engines["a"].restart
    limits = again.engines["a"].limits
    assert {name: limits[name] for name in ("prefill", "own", "tiny")} == first.engines["a"].limits


def test_errors_know_their_codes():
    """The class of an error is its exit code."""
    assert ConfigError("x").exit_code == 78
