"""`events` and `logs`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import click

from stallwatch.cli.client import Client, client, segment
from stallwatch.cli.output import clean, flush, out, out_json, out_json_line, say
from stallwatch.cli.settings import HELP, common, settings
from stallwatch.errors import DaemonUnreachable

_SILENT_S = 45.0  # the daemon sends a comment every 15 s


@click.command(context_settings=HELP)
@click.argument("name", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on with what happens.")
@click.option("--after", type=click.IntRange(0), default=0, help="Only events after this id.")
@common()
def events(name: str | None, *, follow: bool, after: int) -> None:
    """What happened, oldest first; NAME: only to that engine."""
    daemon = client()
    if name:
        daemon.get(f"/v1/engines/{segment(name)}")  # a wrong name is an error, not silence
    if follow:
        for event in _follow(daemon, after, name):
            _one(event)
            flush()
        return
    found = all_events(daemon, name, after=after)
    if settings().json:
        out_json({"items": found})
        return
    for event in found:
        _one(event)
    if not found:
        say("no events")


def all_events(daemon: Client, name: str | None, *, after: int = 0) -> list[dict[str, Any]]:
    """What the daemon still has, oldest first; it gives one page at a time."""
    found: list[dict[str, Any]] = []
    while True:
        page = daemon.get("/v1/events", follow=False, after=after, engine=name)
        found += page["items"]
        if page["last"] <= after:
            return found
        after = page["last"]


def _one(event: dict[str, Any]) -> None:
    if settings().json:
        out_json_line(event)
    elif settings().output == "name":
        out(clean(event["id"]))
    else:
        kind, engine = clean(event["type"]), clean(event["engine"]) or "-"
        out(f"{clean(event['at'])}  {engine:<10} {kind:<10} {clean(event['message'])}")


def _follow(daemon: Client, after: int, name: str | None) -> Iterator[dict[str, Any]]:
    """Events for ever; comes back after a lost connection with the last id it saw."""
    path = "/v1/events" + (f"?engine={segment(name)}" if name else "")
    lost_at: float | None = None
    while True:
        try:
            for data in _stream(daemon, path, after):
                lost_at = None
                after = int(data["id"])
                yield data
        except DaemonUnreachable:
            lost_at = lost_at or time.monotonic()
            if time.monotonic() - lost_at > settings().timeout:
                raise
        except OSError:
            say("the stream broke off; trying again")
        daemon.close()
        time.sleep(0.5)


def _stream(daemon: Client, path: str, after: int) -> Iterator[dict[str, Any]]:
    headers = {"Last-Event-ID": str(after), "Accept": "text/event-stream"}
    for line in daemon.lines(path, timeout=_SILENT_S, headers=headers):
        if line.startswith("data: "):
            found = json.loads(line.removeprefix("data: "))
            if isinstance(found, dict):
                yield found


@click.command(context_settings=HELP)
@click.argument("name")
@click.option("-n", "--lines", type=click.IntRange(1, 10000), default=100, show_default=True)
@common()
def logs(name: str, lines: int) -> None:
    """The last lines of an engine's output."""
    found = client().get(f"/v1/engines/{segment(name)}/logs", lines=lines)["items"]
    if settings().json:
        out_json({"items": found})
        return
    for line in found:
        out(clean(str(line).expandtabs()))
