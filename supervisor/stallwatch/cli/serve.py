"""`serve`: the only command that imports the daemon."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stallwatch import paths
from stallwatch.cli.output import say
from stallwatch.cli.settings import HELP, common, settings

if TYPE_CHECKING:
    from stallwatch.config import Config


@click.command(
    # the first word that is no option begins the engine's command, with or without "--"
    context_settings={**HELP, "allow_interspersed_args": False}
)
@click.option("-c", "--config", "file", type=click.Path(dir_okay=False), help="TOML file.")
@click.option("--name", help="The engine's name (default: engine).")
@click.option("--observe", is_flag=True, help="Report only: fail no client, kill nothing.")
@click.option("--enforce", type=click.Choice(["observe", "fail", "restart"]))
@click.option("--engine-port", type=click.IntRange(1, 65535), help="The engine's port.")
@click.option("--limit", "limits", multiple=True, metavar="PHASE=DURATION", help="Repeatable.")
@click.option("--control", metavar="HOST:PORT", help="Control address (127.0.0.1:9470).")
@click.option("--health-listen", metavar="HOST:PORT", help="Probes and metrics only.")
@click.option("--socket", metavar="PATH", help="Control socket.")
@click.option("--token-file", metavar="PATH", help="File with the bearer token.")
@click.option("--state-dir", metavar="DIR", help="Where reports and budgets are kept.")
@click.option(
    "--gateway",
    is_flag=False,
    flag_value="127.0.0.1:8000",
    metavar="[HOST:PORT]",
    help="Serve clients there, by a process in front of the engines.",
)
@common(output=False, remote=False)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def serve(file: str | None, name: str | None, command: tuple[str, ...], **flags: Any) -> int:
    """Start engines and supervise them until they end.

    \b
    stallwatch serve -- vllm serve MODEL --port 8001
    stallwatch serve --observe --limit execute_model=30s -- COMMAND ...
    stallwatch serve -c stallwatch.toml
    """
    settings().crash_code = 70
    config = configure(file, name, command, flags)
    from stallwatch.daemon import run

    code = run(config)
    if code:  # 0: it was asked to stop
        _point_to_reports(os.path.abspath(config.supervisor.state_dir or paths.state_dir()))
    return code


def _point_to_reports(state_dir: str) -> None:
    """The command that reads what this daemon found, if the disk took any of it."""
    from stallwatch.cli.ledger import LedgerFile
    from stallwatch.cli.reports import DATABASE
    from stallwatch.errors import StallwatchError

    if not os.path.lexists(os.path.join(state_dir, DATABASE)):
        return  # it ended before it could find anything
    try:
        kept = LedgerFile(state_dir).stalls(1)
    except StallwatchError as error:
        say(f"reports: none can be read: {error.message}")
        return
    if kept:
        say(f"reports: stallwatch stalls --state-dir {shlex.quote(state_dir)}")
    else:
        say(f"reports: none was kept in {shlex.quote(state_dir)}")


def configure(
    file: str | None, name: str | None, command: tuple[str, ...], flags: dict[str, Any]
) -> Config:
    """The configuration that the flags mean. ConfigError or click.UsageError."""
    if bool(file) == bool(command):
        raise click.UsageError("give a command after `--`, or a file with -c (not both)")
    overrides = _overrides(flags)
    if file:
        if name or flags.get("engine_port"):
            raise click.UsageError("--name and --engine-port belong to `serve -- COMMAND`")
        if flags.get("observe"):
            overrides["engine"]["enforce"] = "observe"
        return _from_file(Path(file), overrides)
    from stallwatch.config import from_command

    config, remarks = from_command(
        command,
        name=name or "engine",
        observe=bool(flags.get("observe")),
        engine_port=flags.get("engine_port"),
        overrides=overrides,
    )
    for remark in remarks:
        say(f"stallwatch: {remark}")
    return config


def _overrides(flags: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The flags as the tables that a file would hold."""
    keys = ("control", "health_listen", "socket", "token_file", "state_dir")
    supervisor = {key: flags[key] for key in keys if flags.get(key) is not None}
    engine: dict[str, Any] = {}
    if flags.get("observe") and flags.get("enforce") not in (None, "observe"):
        raise click.UsageError("--observe and --enforce contradict each other")
    if flags.get("enforce"):
        engine["enforce"] = flags["enforce"]
    for each in flags.get("limits") or ():
        phase, equals, duration = each.partition("=")
        if not equals:
            raise click.UsageError(f"--limit {each}: write PHASE=DURATION, like execute_model=30s")
        engine.setdefault("limits", {})[phase] = duration
    gateway = {"listen": flags["gateway"]} if flags.get("gateway") else {}
    return {"supervisor": supervisor, "engine": engine, "gateway": gateway}


def _from_file(path: Path, overrides: dict[str, dict[str, Any]]) -> Config:
    """The file, with the flags over it; engine flags go to every engine."""
    from stallwatch.config import load

    config = load(path)
    if not any(overrides.values()):
        return config
    import tomllib

    from stallwatch.config.load import build

    data = tomllib.loads(path.read_text())
    data.setdefault("supervisor", {}).update(overrides["supervisor"])
    if overrides["gateway"]:
        data.setdefault("gateway", {}).update(overrides["gateway"])
    for engine in data["engines"].values():
        limits = {**engine.get("limits", {}), **overrides["engine"].get("limits", {})}
        engine.update({**overrides["engine"], "limits": limits})
    return build(data, source=str(path))
