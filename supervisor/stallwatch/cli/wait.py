"""`wait`: until an engine is ready, stalled or stopped."""

from __future__ import annotations

import time
from typing import Any

import click

from stallwatch.cli.client import client, segment
from stallwatch.cli.output import clean, out, out_json, say
from stallwatch.cli.settings import HELP, Duration, Settings, common, settings
from stallwatch.errors import DaemonUnreachable

_EVERY_S = 0.2
_STALLED = ("stalled", "failed", "exhausted", "unkillable")
_HOPELESS = {
    # what will not come true without somebody's help
    "ready": ("exhausted", "unkillable", "failed", "stopped"),
    "stopped": ("unkillable",),
    "stalled": ("stopped",),
}


def _true(engine: dict[str, Any], goal: str, first: dict[str, Any]) -> bool:
    if goal == "ready":
        return bool(engine["ready"])
    if goal == "stopped":
        return bool(engine["state"] == "stopped")
    # a restart may be faster than our look: a new stall id counts as well
    return engine["state"] in _STALLED or engine["last_stall"] != first["last_stall"]


def _hopeless(engine: dict[str, Any], goal: str) -> bool:
    """It will not come true by itself. FAILED with a tree is only on its way to a restart."""
    on_its_way = engine["state"] == "failed" and (engine["up"] or engine.get("comes_back"))
    return engine["state"] in _HOPELESS[goal] and not on_its_way


@click.command(context_settings=HELP)
@click.argument("name")
@click.option(
    "--for",
    "goal",
    type=click.Choice(["ready", "stalled", "stopped"]),
    default="ready",
    show_default=True,
)
@click.option("--timeout", "limit", type=Duration(), default="60s", show_default=True)
@common(remote=False)
@click.option("--url", "url", help="Daemon's address (STALLWATCH_URL).")
@click.option("--socket", "socket", help="Daemon's socket (STALLWATCH_SOCKET).")
@click.option("--token-file", "token_file", help="File with the token (STALLWATCH_TOKEN).")
def wait(name: str, goal: str, limit: float, **where: str | None) -> int:
    """Wait for a state. Exit 0: it is so; 3: it cannot become so; 124: not in time."""
    _address(settings(), where)
    deadline = time.monotonic() + limit
    daemon, first, engine, told, hopeless = client(), None, None, False, False
    while True:
        try:
            engine = daemon.get(f"/v1/engines/{segment(name)}")
        except DaemonUnreachable as exc:
            # `serve` may still be starting
            if time.monotonic() >= deadline:
                raise
            if not told:
                told = True
                say(f"{clean(exc.message)}\nwaiting up to {limit:g} s for one, then for {name}")
            time.sleep(_EVERY_S)
            continue
        first = first or engine
        if _true(engine, goal, first):
            return _end(engine, 0, "")
        before, hopeless = hopeless, _hopeless(engine, goal)
        if before and hopeless:  # twice: a daemon that begins has stopped engines for a moment
            return _end(engine, 3, f"{name} is {engine['state']} and will not become {goal}")
        if time.monotonic() >= deadline:
            return _end(engine, 124, f"{name} is {engine['state']}, not {goal}, after {limit:g} s")
        time.sleep(max(0.0, min(_EVERY_S, deadline - time.monotonic())))


def _address(found: Settings, where: dict[str, str | None]) -> None:
    if where["url"] or where["socket"]:
        found.url, found.socket = where["url"] or "", where["socket"] or ""
    found.token_file = where["token_file"] or found.token_file


def _end(engine: dict[str, Any], code: int, message: str) -> int:
    if settings().json:
        out_json(engine)
    elif code == 0:
        out(clean(f"{engine['name']} {engine['state']}"))
    if message:
        why = f": {engine['reason']}" if engine["reason"] else ""
        say(clean(message + why))
    return code
