"""`config check` and `config show`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stallwatch.cli.output import fields, out, out_json, say
from stallwatch.cli.settings import HELP, common, settings

if TYPE_CHECKING:
    from stallwatch.config import Config, SupervisorConfig


@click.group(context_settings=HELP)
def config() -> None:
    """Check or show a configuration."""


@config.command(context_settings=HELP, epilog="Example: stallwatch config check stallwatch.toml")
@click.argument("file", type=click.Path(dir_okay=False))
@common(remote=False)
def check(file: str) -> None:
    """Read FILE and say what is wrong with it (exit 78), or that it is good."""
    from stallwatch.config import load
    from stallwatch.config.remarks import near_misses

    found = load(Path(file))
    _refuse_open(found.supervisor)
    names, remarks = list(found.engines), near_misses(found)
    for remark in remarks:
        say(f"warning: {remark}")
    if settings().json:
        out_json({"file": file, "ok": True, "engines": names, "warnings": remarks})
    elif settings().output == "name":
        out("\n".join(names))
    else:
        say(f"{file} is good: {len(names)} engine{'s' if len(names) != 1 else ''}")


def _refuse_open(supervisor: SupervisorConfig) -> None:
    """What `serve` refuses. A token file may lie on another machine: it is taken as given."""
    from stallwatch.control.auth import Auth, load_token

    file = supervisor.token_file
    Auth.for_address(supervisor.control, token=str(file) if file else load_token(None))


@config.command(context_settings=HELP, epilog="Example: stallwatch config show stallwatch.toml")
@click.argument("file", type=click.Path(dir_okay=False))
@common(remote=False)
def show(file: str) -> None:
    """Every key in force, defaults included; durations as the file would hold them."""
    from stallwatch.config import load

    found = in_force(load(Path(file)))
    if settings().json:
        out_json(found)
    else:
        fields(_flat("", found))


def in_force(config: Config) -> dict[str, Any]:
    """The configuration as the daemon will use it: defaults filled in, durations as text."""
    from stallwatch import paths

    found: dict[str, Any] = _written(config.model_dump())
    supervisor = found["supervisor"]
    state_dir = supervisor["state_dir"] = supervisor["state_dir"] or paths.state_dir()
    supervisor["socket"] = supervisor["socket"] or paths.listen_socket(state_dir)
    supervisor["exit_when"] = supervisor["exit_when"] or "never"
    for engine in found["engines"].values():
        engine["limits"] = {**_default_limits(), **engine["limits"]}
    return found


def _default_limits() -> dict[str, str]:
    from stallwatch.watch.limits import FIELDS
    from stallwatch.watch.policy import DEFAULT_PHASE_LIMITS, Policy

    policy = Policy()
    ns = {key: getattr(policy, name) for key, name in FIELDS.items()} | dict(DEFAULT_PHASE_LIMITS)
    return {key: _duration(each / 1e9) for key, each in ns.items()}


def _written(value: Any) -> Any:
    """The value as the file would hold it. Every number with a fraction is a duration."""
    if isinstance(value, float):
        return _duration(value)
    if isinstance(value, dict):
        return {key: _written(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_written(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _duration(seconds: float) -> str:
    """The short form, if it says the same: it keeps six digits only."""
    from decimal import Decimal

    from stallwatch.config.duration import parse_duration, show_duration

    short = show_duration(seconds)
    try:
        if parse_duration(short) == seconds:
            return short
    except ValueError:
        pass
    return f"{Decimal(repr(seconds)):f}s"


def _flat(prefix: str, value: object) -> list[tuple[str, object]]:
    if isinstance(value, dict) and value:
        return [pair for key, item in value.items() for pair in _flat(f"{prefix}.{key}", item)]
    if isinstance(value, list | bool):  # as TOML writes them
        value = json.dumps(value)
    return [(prefix.removeprefix("."), "-" if value in (None, "", {}) else str(value))]
