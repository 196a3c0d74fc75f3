"""`gateway`: the pass-through as a process. The daemon starts it; a unit or container may, too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from stallwatch import paths
from stallwatch.cli.settings import HELP, common, settings
from stallwatch.errors import ConfigError

_DURATIONS = ("hold", "deadline", "slow_client", "drain")
_LIMITS = ("first_token", "between_tokens", "whole_answer")
_COUNTS = ("hold_most", "max_in_flight", "max_connections")


@click.command(context_settings=HELP)
@click.option("-c", "--config", "file", type=click.Path(dir_okay=False), help="TOML file.")
@click.option("--listen", metavar="HOST:PORT", help="Also unix:PATH (127.0.0.1:8000).")
@click.option("--engine", "engines", multiple=True, metavar="NAME", help="A replica; repeatable.")
@click.option(
    "--upstream", "upstreams", multiple=True, metavar="NAME=ADDRESS", help="Where it listens."
)
@click.option("--hold", metavar="DURATION", help="Longest wait for an engine (0s: refuse).")
@click.option("--hold-most", type=int, help="Requests that may wait so (256).")
@click.option("--retry", type=click.Choice(["never", "before-first-byte"]))
@click.option("--max-in-flight", type=int, help="More are answered 429 (1024).")
@click.option("--max-connections", type=int, help="More are closed (4096).")
@click.option("--deadline", metavar="DURATION", help="Of one request (0s: none).")
@click.option("--first-token", metavar="DURATION", help="Silence that is reported (2m).")
@click.option("--between-tokens", metavar="DURATION", help="The same, in a stream (1m).")
@click.option("--whole-answer", metavar="DURATION", help="The same, not streamed (10m).")
@click.option("--slow-client", metavar="DURATION", help="A client that takes nothing (1m).")
@click.option("--drain", metavar="DURATION", help="For what runs at the end (30s).")
@common(output=False)
def gateway(file: str | None, **flags: Any) -> int:
    """Serve OpenAI clients in front of the engines of a running daemon.

    Every request gets the engine's answer or an explicit error. The daemon is found as by all
    other commands: --socket, --url, STALLWATCH_SOCKET, or the default places.
    """
    settings().crash_code = 70
    found = _configured(file, flags)
    url, token = settings().url, ""
    control = "" if url else settings().socket or _first_socket()
    if url:
        from stallwatch.control.auth import load_token

        token = load_token(settings().token_file or None) or ""
    from stallwatch.gateway.main import run

    return run(found.options(), url=url, control=control, token=token)


def _configured(file: str | None, flags: dict[str, Any]) -> Any:
    from stallwatch.config.load import build_gateway, load

    table: dict[str, Any] = {}
    if file:
        config = load(Path(file))
        table = config.gateway.written() if config.gateway is not None else {}
    for key in ("listen", "retry", *_DURATIONS, *_COUNTS):
        if flags[key] is not None:
            table[key] = flags[key]
    if flags["engines"]:
        table["engines"] = list(flags["engines"])
    for each in flags["upstreams"]:
        name, equals, place = each.partition("=")
        if not equals:
            raise ConfigError(f"--upstream {each}: write NAME=ADDRESS, like chat=127.0.0.1:8001")
        table.setdefault("upstreams", {})[name] = place
    for key in _LIMITS:
        if flags[key] is not None:
            table.setdefault("limits", {})[key] = flags[key]
    return build_gateway(table, source=file or "")


def _first_socket() -> str:
    """The first place where a daemon's socket lies; where it would be, if there is none yet."""
    places = paths.client_sockets()
    return next((path for path in places if os.path.exists(path)), places[0])
